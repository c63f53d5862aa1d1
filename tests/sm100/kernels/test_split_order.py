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
from tests.sm100.emulator import Compiled, HazardError, Options
from tests.sm100.emulator.engines import Mode
from tests.sm100.support.mutants import compile_changed, without_each
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


SMALL = ProductCase(KernelShape(16, split_k=2), tokens=16, features=128, k=512)
SENT = "st.shared::cluster"
RELEASE, ACQUIRE = "mbarrier.arrive.release.cluster", "mbarrier.try_wait.parity.acquire.cluster"
UNORDERED = "read of shared memory .* without being ordered after its write"


def small() -> Compiled:
    call, epilogue = SMALL.build()
    return compile_call(call, epilogue)


@pytest.mark.parametrize("mode", [Options(), Options("random", 1)], ids=["immediate", "random"])
def test_the_exchange_needs_the_warp_to_meet(mode: Options) -> None:
    """After the last write to another CTA: one lane hands on what all have written."""
    sent = small().ptx.rindex(SENT)
    mutants = [
        mutant for mutant in without_each(small(), r"bar\.warp\.sync") if mutant[1].ptx[:sent] == small().ptx[:sent]
    ]
    with pytest.raises(HazardError, match=UNORDERED):
        SMALL.check(mode, compiled=mutants[0][1])


LATER = ProductCase(KernelShape(16, split_k=2), tokens=32, features=128, k=512)
"""Two tiles of one cluster: sums of the second overwrite those of the first."""


@pytest.mark.parametrize("mode", ["immediate", "random"])
@pytest.mark.parametrize("scope", ["", ".release.cta|.acquire.cta"], ids=["none", "the CTA's"])
def test_every_signal_and_wait_of_the_exchange_needs_the_scope_of_the_cluster(scope: str, mode: Mode) -> None:
    """By the PTX memory model, to the letter: those that order reads before another CTA's overwriting, too."""
    call, epilogue = LATER.build()
    compiled, options = compile_call(call, epilogue), Options(mode, 1, strict_scopes=True)
    LATER.check(options, compiled=compiled)
    release, _, acquire = scope.partition("|")
    places = [
        (found.start(), what, what.replace(wide, narrow))
        for what, wide, narrow in ((RELEASE, ".release.cluster", release), (ACQUIRE, ".acquire.cluster", acquire))
        for found in re.finditer(re.escape(what), compiled.ptx)
    ]
    assert len(places) == 4
    found = []
    for place, what, narrowed in sorted(places):
        ptx = compiled.ptx[:place] + narrowed + compiled.ptx[place + len(what) :]
        with pytest.raises(HazardError) as error:
            LATER.check(options, compiled=Compiled(compiled.function, ptx))
            pytest.fail(f"not noticed: {what} at {place}")
        found.append("after its read" if "ordered after its read" in str(error.value) else "after its write")
    assert found == ["after its read", "after its write", "after its write", "after its read"]
