"""Grouped products with fused SwiGLU and re-quantisation on the SM100 kernel, executed in the emulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nvfp4_sgl.cutedsl_kernels.common.shape import Output
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import EmulatorError, Options
from tests.sm100.emulator.errors import MemoryFaultError
from tests.sm100.support.mutants import compile_changed
from tests.sm100.support.products import ExpertCase
from tests.support.full import full

STRICT = Options(strict_tensor_waits=True)


def gate_up(token_tile: int, pair: bool = False, split_k: int = 1, output: Output = "nvfp4") -> KernelShape:
    return KernelShape(token_tile, pair=pair, gated=True, grouped=True, split_k=split_k, output=output)


def down(token_tile: int, pair: bool = False, split_k: int = 1, output: Output = "bf16") -> KernelShape:
    return KernelShape(token_tile, pair=pair, grouped=True, split_k=split_k, output=output)


def ahead(shape: KernelShape) -> KernelShape:
    return replace(shape, counts_ahead=True)


CASES = [
    # Few tokens: an empty expert first, in the middle and last, one tile and more.
    ExpertCase(gate_up(8), (0, 1, 9, 0, 8, 0), features=128, k=320),
    ExpertCase(gate_up(8, output="bf16"), (3, 0, 17), features=192, k=128),
    ExpertCase(gate_up(16, output="fp32"), (1, 15), features=64, k=256),
    ExpertCase(gate_up(64), (64, 0, 3), features=128, k=256),
    # Many: one expert has nearly all.
    ExpertCase(gate_up(128), (1, 150, 0), features=128, k=320),
    ExpertCase(gate_up(128, pair=True, output="bf16"), (5, 0, 129), features=320, k=128),
    # Pairs that share operands; a block's second token tile lies beyond an expert's rows.
    ExpertCase(replace(gate_up(128, pair=True), shared_tokens=2), (3, 130), features=192, k=64),
    ExpertCase(replace(down(128, pair=True), shared_weights=2), (3, 130, 0, 128, 257), features=136, k=64),
    ExpertCase(
        replace(gate_up(128, pair=True), shared_weights=2),
        (1, 256, 0, 2),
        features=128,
        k=64,
    ),
    ExpertCase(down(8), (0, 2, 11, 0), features=200, k=192),
    ExpertCase(down(32, output="fp32"), (33, 4), features=136, k=384),
    ExpertCase(down(128, pair=True), (3, 0, 131), features=264, k=128),
    ExpertCase(down(256, pair=True), (257, 0, 1), features=256, k=128),
    # K split over a cluster.
    ExpertCase(gate_up(8, split_k=2), (0, 1, 9, 0, 8), features=96, k=576),
    ExpertCase(gate_up(64, split_k=2), (65,), features=64, k=576),
    ExpertCase(gate_up(8, split_k=8, output="bf16"), (3, 0, 8), features=64, k=2112),
    ExpertCase(down(8, split_k=4), (0, 9, 2), features=200, k=1024),
    ExpertCase(down(32, split_k=2, output="fp32"), (33, 4), features=136, k=512),
    # Counts ahead: an empty expert first; more K than stages; pairs whose second token tile lies beyond the rows.
    ExpertCase(ahead(gate_up(8)), (0, 1, 9, 0), features=64, k=2304),
    ExpertCase(ahead(down(16, split_k=4)), (0, 17, 2), features=136, k=1024),
    ExpertCase(ahead(replace(down(128, pair=True), shared_weights=2)), (0, 130, 1), features=136, k=64),
]
LARGER = [
    ExpertCase(gate_up(32), (40, 1), features=128, k=192),
    ExpertCase(gate_up(128, pair=True), (130, 2), features=256, k=320),
    ExpertCase(gate_up(256, pair=True), (1, 0, 258), features=160, k=64),
    ExpertCase(replace(gate_up(128, pair=True), shared_tokens=2), (3, 130), features=320, k=64),
    ExpertCase(gate_up(16, split_k=4), (17, 0, 3), features=64, k=1088),
    ExpertCase(gate_up(64, split_k=8), (2, 65), features=96, k=2048),
]


def name(case: ExpertCase) -> str:
    kind = "gate up" if case.shape.gated else "down"
    if case.shape.pair:
        kind += f" {case.shape.shared_tokens}x{case.shape.shared_weights} pairs"
    kind += f" split {case.shape.split_k}" * (case.shape.split_k > 1)
    kind += " ahead" * case.shape.counts_ahead
    return f"{kind} {case.shape.token_tile} {case.shape.output} {case.counts} {case.features}x{case.k}"


@pytest.mark.parametrize("case", [*CASES, *full(*LARGER)], ids=name)
def test_equals_the_reference(case: ExpertCase) -> None:
    case.check(STRICT)


@pytest.mark.parametrize(
    "shape",
    [
        down(8),
        down(8, split_k=2),
        replace(down(128, pair=True), shared_weights=2),
        ahead(down(8, split_k=2)),
        ahead(replace(down(128, pair=True), shared_weights=2)),
    ],
    ids=str,
)
def test_no_expert_has_a_token(shape: KernelShape) -> None:
    statistics = ExpertCase(shape, (0, 0, 0), features=128, k=512).check(STRICT)
    assert statistics.engine_bytes["tma_load"] == statistics.engine_bytes["tma_store"] == 0


@pytest.mark.parametrize("grouped", [True, False])
def test_a_shared_expert_is_one_group(grouped: bool) -> None:
    """Its tokens are counted on the device, or simply all rows."""
    ExpertCase(replace(gate_up(8), grouped=grouped), (6,), features=128, k=256).check(STRICT)
    ExpertCase(replace(gate_up(128, pair=True), grouped=grouped), (131,), features=128, k=64).check(STRICT)
    ExpertCase(replace(gate_up(16, split_k=4), grouped=grouped), (18,), features=96, k=1088).check(STRICT)


# The last tile has rows of block scales that are nobody's; so have tiles beside it that a cluster takes on.
ALONE = [
    ExpertCase(replace(gate_up(256, pair=True), grouped=False), (257,), features=64, k=64),
    ExpertCase(replace(gate_up(128, pair=True), grouped=False, shared_weights=4), (129,), features=64, k=64),
]


@pytest.mark.parametrize("case", ALONE, ids=name)
def test_a_tile_ends_beyond_the_last_scales(case: ExpertCase, tmp_path: Path) -> None:
    case.check(STRICT)
    change = {" & (atom * atom_rows < rows)": ""}
    mutant = compile_changed(tmp_path, "sm100/quantized_store.py", change, case.shape, case.epilogue("nvfp4"))
    with pytest.raises(MemoryFaultError):
        case.check(STRICT, compiled=mutant)


def test_only_experts_with_tokens_are_read() -> None:
    k, features = 256, 128
    case = ExpertCase(down(8), (0, 5, 0, 0, 1), features, k)
    statistics = case.check(STRICT)
    weights = features * k // 2 + features * k // 16
    tokens = 8 * k // 2 + 128 * k // 16
    assert statistics.engine_bytes["tma_load"] == 2 * (weights + tokens)


def all_experts() -> ExpertCase:
    """512 experts, tokens at both ends and in the middle, around the ends of the runs of 16."""
    counts = [0] * 512
    for expert in (0, 15, 16, 31, 255, 256, 510, 511):
        counts[expert] = 1 + expert % 9
    return ExpertCase(down(8), tuple(counts), features=8, k=64)


@pytest.mark.parametrize("clusters", [1, 2, 5])
def test_most_experts_there_can_be(clusters: int) -> None:
    all_experts().check(STRICT, clusters)


@pytest.mark.parametrize(
    "change",
    [
        {"vote_ballot_sync(self.table[lane] <= row)": "vote_ballot_sync(self.table[lane] < row)"},
        {"lane % EXPERTS_PER_LANE)] <= row": "lane % EXPERTS_PER_LANE)] < row"},
        {"& ((1 << EXPERTS_PER_LANE) - 1)": "& ((1 << (EXPERTS_PER_LANE - 1)) - 1)"},
        {"befores.append(running)\n": "befores.append(running + 1)\n"},
    ],
    ids=["run", "expert", "one expert fewer", "rows before"],
)
def test_another_expert_is_noticed(change: dict[str, str], tmp_path: Path) -> None:
    case = all_experts()
    mutant = compile_changed(tmp_path, "common/schedule.py", change, case.shape, case.epilogue("bf16"))
    with pytest.raises((AssertionError, EmulatorError)):
        case.check(compiled=mutant)
