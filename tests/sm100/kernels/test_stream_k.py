"""Tiles shared by pairs along K: right whatever the timing, summed in one order, and every step of it is needed."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from nvfp4_sgl.cutedsl_kernels import plan, warm_up, workspace
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS, Clusters
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import WorkspaceError
from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.choose import choose_gemm
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import COUNTER_WORDS, KernelShape
from nvfp4_sgl.cutedsl_kernels.w4a4 import custom_ops  # noqa: F401
from nvfp4_sgl.weights.gemms import GemmSpec
from tests.sm100.emulator import Compiled, DeadlockError, HazardError, Options, emulated
from tests.sm100.support.launcher import emulated_operations
from tests.sm100.support.mutants import compile_changed
from tests.sm100.support.products import ProductCase, compile_call, run
from tests.sm100.support.sliced_products import added, sliced_product
from tests.support.full import but_for, full

SHAPE = KernelShape(256, pair=True, stream_k=True)
FP32 = replace(SHAPE, output="fp32")
CASES = {
    "one of three tiles by two pairs": (ProductCase(SHAPE, tokens=250, features=520, k=320), 2),
    "one of four tiles by three pairs": (ProductCase(FP32, tokens=20, features=136, k=576, groups=4), 3),
    "two of six tiles by two pairs each": (ProductCase(SHAPE, tokens=20, features=40, k=320, groups=6), 4),
    "two of five tiles by a pair each": (ProductCase(FP32, tokens=257, features=72, k=128, groups=1), 2),
    "more pairs than stages": (ProductCase(SHAPE, tokens=8, features=136, k=64, groups=3), 2),
    "no whole tile": (ProductCase(replace(SHAPE, operands="mxfp8"), tokens=200, features=200, k=288), 2),
}


LONG = ("one of four tiles by three pairs", "two of six tiles by two pairs each")


@pytest.mark.parametrize("case", but_for(CASES, *LONG))
def test_equals_fp64_after_rounding(case: str) -> None:
    """From sums that are no numbers before; ragged tokens, features and K."""
    product, clusters = CASES[case]
    product.check(Options(strict_tensor_waits=True), clusters)


TIMED = ProductCase(SHAPE, tokens=40, features=40, k=512, groups=3)


@functools.cache
def immediate() -> torch.Tensor:
    call, epilogue = TIMED.build()
    run(call, epilogue, clusters=2)
    return call.out


@pytest.mark.parametrize(
    "options", [Options("random", 1), *full(Options("starved", 2, "tensor")), Options(backwards=True)]
)
def test_results_do_not_depend_on_timing(options: Options) -> None:
    call, epilogue = TIMED.build()
    run(call, epilogue, replace(options, strict_tensor_waits=True), clusters=2)
    assert torch.equal(call.out, immediate())


ODD = ProductCase(SHAPE, tokens=256, features=40, k=768, groups=4)
"""One of four tiles is for three pairs, some of whose warps store an odd number of chunks of it."""
LATE_STORES = Options("starved", 2, "tma_store")


def test_staging_buffers_are_free_after_an_odd_number_of_stores() -> None:
    ODD.check(LATE_STORES, 3)


def test_else_the_next_tile_overwrites_what_a_store_reads(tmp_path: Path) -> None:
    changes = {"begins.\n        epilogue.finish()": "begins."}
    mutant = compile_changed(tmp_path, "sm100/gemm.py", changes, SHAPE, Epilogue())
    with pytest.raises(HazardError, match="shared memory"):
        ODD.check(LATE_STORES, 3, compiled=mutant)


# The order of sums.

SLICES, FEATURES, TOKENS = 3, 40, 48


def make() -> tuple[Call, np.ndarray]:
    """A tile for three pairs, and the sums of each."""
    return sliced_product(FP32, SLICES, TOKENS, FEATURES)


def test_sums_are_added_in_the_order_of_k() -> None:
    call, sums = make()
    run(call, Epilogue(), clusters=SLICES)
    assert np.array_equal(call.out[:, 0].numpy(), added(sums))
    for order in permutations(range(SLICES)):
        differing = np.mean(added(sums[list(order)]) != added(sums))
        assert differing > 0.1 or order in ((0, 1, 2), (1, 0, 2)), order


def test_another_order_in_the_kernel_is_noticed(tmp_path: Path) -> None:
    changes = {
        "self._read(parts[i], first + i, chunk": "self._read(parts[i], (first + i + 1) % self.work.sharers, chunk",
    }
    mutant = compile_changed(tmp_path, "sm100/stream_k.py", changes, FP32, Epilogue())
    call, sums = make()
    run(call, Epilogue(), clusters=SLICES, compiled=mutant)
    assert np.array_equal(call.out[:, 0].numpy(), added(np.roll(sums, -1, axis=0)))
    assert not np.array_equal(call.out[:, 0].numpy(), added(sums))


# Launches one after the other on one workspace, the later of which begin early.

SMALL = ProductCase(SHAPE, tokens=8, features=40, k=512)
"""One tile for two pairs."""


@functools.cache
def small() -> tuple[Compiled, torch.Tensor]:
    """The kernel, and what it makes of the product."""
    call, epilogue = SMALL.build()
    run(call, epilogue, clusters=2)
    return compile_call(call, epilogue), call.out


def run_twice(second: Compiled, options: Options | None = None) -> None:
    """The same product twice.

    Raises:
        AssertionError: a result is wrong, or a counter is not zero at last.
        EmulatorError: what a kernel did wrong.
    """
    first, expected = small()
    call, _ = SMALL.build()
    calls = [call, replace(call, out=torch.full_like(call.out, float("nan")))]
    assert call.workspace is not None
    writes = [calls[0].out, calls[1].out, call.workspace]
    with emulated(options or Options(overlap=True), reads=call.tensors()[0], writes=writes) as emulator:
        for one, compiled in zip(calls, (first, second), strict=True):
            emulator(compiled, one.arguments(2), 0)
    assert all(torch.equal(one.out, expected) for one in calls)
    assert not call.workspace[: 4 * COUNTER_WORDS].any()


@pytest.mark.parametrize("options", [Options(overlap=True), Options("random", 3, overlap=True)])
def test_launches_share_a_workspace(options: Options) -> None:
    run_twice(small()[0], options)


UNORDERED = "read of global memory .* without being ordered after the write"
PLANTED: dict[str, tuple[str, str, type[Exception], str]] = {
    "no release": ("atom.global.release.add", "atom.global.relaxed.add", HazardError, UNORDERED),
    "no acquire": ("ld.acquire.gpu.global", "ld.relaxed.gpu.global", HazardError, UNORDERED),
    "a release to the CTA": ("atom.global.release.add", "atom.global.release.cta.add", HazardError, "scope"),
    "no signal": ("atom.global.release.add.u32", "//", DeadlockError, "polling|another value"),
}


@pytest.mark.parametrize("what", PLANTED)
def test_the_exchange_needs(what: str) -> None:
    old, new, error, message = PLANTED[what]
    mutant = small()[0].patched(old, new)
    call, epilogue = SMALL.build()
    with pytest.raises(error, match=message):
        run(call, epilogue, clusters=2, compiled=mutant)


def test_the_workspace_needs_the_wait_for_the_launch_before() -> None:
    """Nothing else of the two launches conflicts. One wait of the two would do: the epilogue comes after the loads."""
    with pytest.raises(HazardError, match=r"writes\[2\].* without griddepcontrol\.wait"):
        run_twice(small()[0].patched("griddepcontrol.wait;", "", count=2))


def test_counters_must_be_reset(tmp_path: Path) -> None:
    """Else the next launch does not wait for sums, and takes those that it finds."""
    changes = {"cute.arch.store(self._counter, Int32(0)": "cute.arch.store(self._counter, before + 1"}
    mutant = compile_changed(tmp_path, "sm100/stream_k.py", changes, SHAPE, Epilogue(), programmatic_launch=True)
    call, epilogue = SMALL.build()
    run(call, epilogue, clusters=2, compiled=mutant)
    assert torch.equal(call.out, small()[1]) and call.workspace is not None
    call.workspace[4 * COUNTER_WORDS :] = 0xFF
    run(call, epilogue, clusters=2, compiled=mutant)
    assert call.out.isnan().any()


# From operations to the workspace.


def test_operations_bring_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product as the model calls it, were it large enough to be planned so; and the warm-up runs the same kernel."""
    monkeypatch.setattr(workspace, "_made", {})
    monkeypatch.setattr(plan, "plan_gemm", lambda *sizes, pin: SHAPE)
    call, _ = SMALL.build()
    gpu = Clusters.in_gpcs((4,))
    with emulated_operations(gpu=gpu) as emulator:
        key = KernelKey("sm_100a", SHAPE)
        warm_up.warm_up([key], torch.device("cpu"))
        made = workspace.workspace(torch.device("cpu"), gpu)
        made[4 * COUNTER_WORDS :] = 0xFF
        torch.ops.nvfp4_sgl.product(
            call.tokens[:, 0], call.token_scales.view(torch.float8_e4m3fn), call.row_scale[:, 0].contiguous(), 128,
            call.weights[0], call.weight_scales.view(torch.float8_e4m3fn), call.alpha[0], call.out[:, 0],
        )  # fmt: skip
    assert emulator.keys == [key, key]
    assert workspace.workspace(torch.device("cpu"), gpu) is made
    assert not made[: 4 * COUNTER_WORDS].any() and not (made == 0xFF).all()
    alone, _ = SMALL.build()
    run(alone, Epilogue(), clusters=1)
    assert torch.equal(call.out, alone.out)


def test_the_warm_up_asks_for_all_that_is_planned() -> None:
    features, k = 2560, 4096
    product = GemmSpec("wq_a and more", features, k, output="fp32")
    keys = warm_up.keys_for([product], 8192, 10.0, "sm_100a", B200_CLUSTERS)
    planned = {choose_gemm(features, k, tokens, output="fp32") for tokens in range(257, 8193, 97)}
    assert FP32 in planned and planned <= {key.shape for key in keys}


def test_without_a_workspace_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = SMALL.build()
    assert call.workspace is not None
    with pytest.raises(WorkspaceError, match="workspace: expected 540672 bytes .* found 0 for 2"):
        replace(call, workspace=None).arguments(2)
    with pytest.raises(WorkspaceError, match="found 540671 for 2"):
        replace(call, workspace=call.workspace[:540671]).arguments(2)
    with pytest.raises(WorkspaceError, match="at most 256 clusters, found .* for 257"):
        call.arguments(257)
    monkeypatch.setattr(workspace, "_made", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(WorkspaceError, match="before a CUDA graph is captured"):
        workspace.workspace(torch.device("cuda", 0), B200_CLUSTERS)


def test_the_workspace_of_a_gpu_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_made", {})
    cpu = torch.device("cpu")
    made = workspace.workspace(cpu, B200_CLUSTERS)
    assert made.numel() == workspace.workspace_bytes(B200_CLUSTERS) == 4 * COUNTER_WORDS + 74 * 256 * 256 * 4
    assert workspace.workspace(cpu, B200_CLUSTERS) is made
    assert workspace.workspace(cpu, Clusters.in_gpcs((16, 16))) is made
