"""Split-K: sums of the slices are added in one order, bit for bit, and every step of their exchange is needed."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, DeadlockError, EmulatorError, HazardError, Options
from tests.sm100.emulator.engines import Mode
from tests.sm100.support.mutants import compile_changed
from tests.sm100.support.products import ProductCase, compile_call, run
from tests.sm100.support.sliced_products import added, sliced_product

FEATURES = 128
SHAPES = [KernelShape(tile, split_k=split, output="fp32") for tile, split in ((8, 2), (8, 4), (32, 4), (64, 8))]
FOUR = SHAPES[1]


def make(shape: KernelShape) -> tuple[Call, np.ndarray]:
    return sliced_product(shape, shape.split_k, shape.token_tile, FEATURES)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.token_tile} tokens, {shape.split_k} slices")
def test_sums_are_added_in_the_order_of_the_slices(shape: KernelShape) -> None:
    call, sums = make(shape)
    run(call, Epilogue())
    assert np.array_equal(call.out[:, 0].numpy(), added(sums))


def test_any_other_order_gives_other_bits() -> None:
    """So that the test above tells; to exchange the first two changes nothing."""
    _, sums = make(FOUR)
    for order in permutations(range(len(sums))):
        differing = np.mean(added(sums[list(order)]) != added(sums))
        assert differing > 0.1 or order in ((0, 1, 2, 3), (1, 0, 2, 3)), order


def test_another_order_in_the_kernel_is_noticed(tmp_path: Path) -> None:
    changes = {
        "total = slices[0]": "total = slices[1]",
        "for one in slices[1:]:": "for one in (*slices[2:], slices[0]):",
    }
    mutant = compile_changed(tmp_path, "common/split.py", changes, FOUR, Epilogue())
    call, sums = make(FOUR)
    run(call, Epilogue(), compiled=mutant)
    assert np.array_equal(call.out[:, 0].numpy(), added(np.roll(sums, -1, axis=0)))
    assert not np.array_equal(call.out[:, 0].numpy(), added(sums))


LATER = ProductCase(KernelShape(16, split_k=2), tokens=32, features=128, k=512)
"""Two tiles of one cluster: sums of the second overwrite those of the first."""
RELEASE, ACQUIRE = "mbarrier.arrive.release.cluster", "mbarrier.try_wait.parity.acquire.cluster"


def later() -> Compiled:
    call, epilogue = LATER.build()
    return compile_call(call, epilogue)


@pytest.mark.parametrize("mode", ["immediate", "random"])
@pytest.mark.parametrize("scope", ["", ".release.cta|.acquire.cta"], ids=["none", "the CTA's"])
def test_every_signal_and_wait_of_the_exchange_needs_the_scope_of_the_cluster(scope: str, mode: Mode) -> None:
    """By the PTX memory model, to the letter: those that order reads before another CTA's overwriting, too."""
    compiled, options = later(), Options(mode, 1, strict_scopes=True)
    LATER.check(options, compiled=compiled)
    release, _, acquire = scope.partition("|")
    places = [
        (found.start(), what, what.replace(wide, narrow))
        for what, wide, narrow in ((RELEASE, ".release.cluster", release), (ACQUIRE, ".acquire.cluster", acquire))
        for found in re.finditer(re.escape(what), compiled.ptx)
    ]
    assert len(places) == 3
    for place, what, narrowed in places:
        ptx = compiled.ptx[:place] + narrowed + compiled.ptx[place + len(what) :]
        with pytest.raises(HazardError, match="without being ordered after its (read|write)"):
            LATER.check(options, compiled=Compiled(compiled.function, ptx))
            pytest.fail(f"not noticed: {what} at {place}")


UNEVEN = ProductCase(KernelShape(8, split_k=4), tokens=40, features=128, k=1024)
"""Five tiles of one unit a warp: one CTA adds it up, the others have none."""
BYTES, SIGNALS = (
    "(self.shape.split_k - 1) * unit_bytes",
    "cutlass.select_(self._owned() > 0, Int32(self.shape.split_k), Int32(0))",
)
UNREAD, UNORDERED = "read of .* without being ordered after its write", "write of .* without being ordered"
MISTAKES: dict[str, tuple[str, str, type[EmulatorError], str]] = {
    "too few bytes expected": (BYTES, "(self.shape.split_k - 2) * unit_bytes", HazardError, UNREAD),
    "too many": (BYTES, "self.shape.split_k * unit_bytes", DeadlockError, "1 arrivals pending, 1024 B outstanding"),
    "signals of those who add up nothing": (
        SIGNALS,
        "Int32(self.shape.split_k)",
        HazardError,
        "phase 0 was neither waited for nor known",
    ),
    "no wait before sums are overwritten": (
        "self._owned() < self.shape.chunks",
        "self._owned() < 0",
        HazardError,
        UNORDERED,
    ),
    "sums sent to another place": (
        "other * self.shape.owned_units",
        "(other + 1) * self.shape.owned_units",
        HazardError,
        UNORDERED,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_exchange_are_noticed(mistake: str, tmp_path: Path) -> None:
    right, wrong, error, words = MISTAKES[mistake]
    call, epilogue = UNEVEN.build()
    UNEVEN.check(compiled=compile_call(call, epilogue))
    mutant = compile_changed(tmp_path, "common/split.py", {right: wrong}, UNEVEN.shape, epilogue)
    with pytest.raises(error, match=words):
        UNEVEN.check(compiled=mutant)
