"""The emulator gives what a Hopper GPU gave, for every instruction that SM100 kernels share with it."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, Options
from tests.sm100.hardware import warpgroup_cases
from tests.sm100.hardware.catalogue import catalogue
from tests.sm100.hardware.record import Recording, ulp_distance
from tests.sm100.hardware.runners import compile_case, emulate, emulated_outputs
from tests.sm100.support.products import ExpertCase, ProductCase
from tests.sm100.support.warpgroup_snippets import accumulator_fragments

RECORDED = Recording.load()
MODES = [Options("random", 1), Options("starved", 2, "tma_load"), Options("starved", 3, "tma_store")]
TIMED = [name for name, case in catalogue().items() if case.timed]
WARPGROUP_CASES = {case.name: case for case in warpgroup_cases.cases()}
WITHOUT_HOPPER = {
    "tcgen05.": "tensor memory and its engine",
    ".cta_group::2": "loads for a pair of CTAs",
    "cvt.rn.satfinite.e2m1x2.f32": "FP4",
    "f32x2": "pairs of f32, calculated as single ones are",
    "ld.param.": "arguments: every case reads some, in other widths",
}
"""Instructions that nothing recorded stands for, by a part of their opcode."""


@functools.cache
def compiled(name: str, architecture: str = "sm_90a") -> Compiled:
    return compile_case(catalogue()[name], architecture)


def assert_recorded(name: str, results: dict[str, bytes]) -> None:
    limits = catalogue()[name].ulp
    wrong = [label for label, result in results.items() if not RECORDED.agrees(label, result, limits.get(label))]
    assert not wrong


@pytest.mark.parametrize("name", catalogue())
def test_emulator_gives_what_the_gpu_gave(name: str) -> None:
    assert_recorded(name, emulate(catalogue()[name], compiled(name)))


@pytest.mark.parametrize("name", TIMED)
def test_timing_changes_nothing(name: str) -> None:
    for options in MODES:
        assert_recorded(name, emulate(catalogue()[name], compiled(name), options))


@pytest.mark.parametrize("name", TIMED)
def test_the_same_source_compiled_for_sm_100a_gives_the_same(name: str) -> None:
    assert_recorded(name, emulate(catalogue()[name], compiled(name, "sm_100a"), MODES[0]))


@pytest.mark.parametrize("name", WARPGROUP_CASES)
def test_warpgroup_multiplications_equal_exact_arithmetic(name: str) -> None:
    """The recorded inputs of wgmma have exact sums, so the PTX ISA's layouts alone say what comes out."""
    case = WARPGROUP_CASES[name]
    function = case.function
    assert isinstance(function, warpgroup_cases.Multiplication) and function.product is not None
    expected = accumulator_fragments(function.product) + case.inputs["before"].numpy() * function.keeps
    for options in MODES[:1] if name != "wgmma bf16" else [Options(), *MODES, Options("starved", 4, "warpgroup")]:
        found = emulated_outputs(case, compiled(name), options)["result"].numpy()
        assert np.array_equal(found, expected.astype(np.float32))


def test_nothing_else_is_recorded() -> None:
    expected = {label for case in catalogue().values() for label in case.results(case.outputs)}
    assert expected == RECORDED.digests.keys() | RECORDED.values.keys()


def test_distances_in_units_in_the_last_place() -> None:
    def distance(left: float, right: float) -> int:
        return ulp_distance(*(np.array([0.0, value], np.float32).tobytes() for value in (left, right)))

    assert distance(1.0, 1 + 2.0**-22) == 2
    assert distance(-0.0, 0.0) == 0
    assert distance(-(2.0**-149), 2.0**-148) == 3
    assert distance(float("nan"), -float("nan")) == 0
    assert distance(float("nan"), 1.0) > 2**31


@pytest.mark.parametrize(
    "case",
    [
        ProductCase(KernelShape(16, split_k=2), tokens=9, features=136, k=512),
        ProductCase(KernelShape(128, pair=True, output="fp32"), tokens=100, features=256, k=128),
        ExpertCase(KernelShape(8, gated=True, grouped=True, output="nvfp4"), (0, 9), features=128, k=128),
        ExpertCase(KernelShape(8, grouped=True), (3, 0, 8), features=136, k=128),
    ],
    ids=["split K", "pair", "gate up", "down"],
)
def test_kernels_rest_on_recorded_instructions(case: ProductCase | ExpertCase) -> None:
    """What this project's kernels execute occurs in the cases, but for what Hopper has not."""
    occurring = {
        ".".join(instruction.opcode)
        for name in catalogue()
        for kernel in compiled(name).kernels.values()
        for instruction in kernel.instructions
    }
    others = case.check(Options(strict_tensor_waits=True)).by_opcode().keys() - occurring
    assert not [opcode for opcode in others if not any(part in opcode for part in WITHOUT_HOPPER)]
