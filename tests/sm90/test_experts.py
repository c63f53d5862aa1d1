"""Experts on the Hopper kernel, gated and not, executed in the emulator, against fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.common.fixed import Fixed
from nvfp4_sgl.cutedsl_kernels.common.shape import Output
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from tests.sm90.support.products import ExpertCase, compile_anew, compile_shape, run, swiglu
from tests.sm100.emulator import EmulatorError, Options
from tests.sm100.support.mutants import without_each
from tests.sm100.support.products import poisoned
from tests.support.full import but_for, full


def gate_up(token_tile: int, split_k: int = 1, output: Output = "bf16", grouped: bool = True) -> KernelShape:
    return KernelShape(token_tile, split_k, output, gated=True, grouped=grouped)


def gather(token_tile: int, split_k: int = 1, output: Output = "bf16") -> KernelShape:
    return replace(gate_up(token_tile, split_k, output), gathers=True)


def down(token_tile: int, split_k: int = 1, output: Output = "bf16") -> KernelShape:
    return KernelShape(token_tile, split_k, output, grouped=True)


def ahead(token_tile: int, split_k: int = 1, output: Output = "bf16") -> KernelShape:
    return replace(down(token_tile, split_k, output), counts_ahead=True)


CASES = [
    # Empty experts first, in the middle and last; one row, a full tile, one more.
    ExpertCase(gate_up(8), (0, 1, 9, 0, 8, 0), features=72, k=192),
    ExpertCase(gate_up(8, output="fp32"), (3, 0, 16), features=72, k=64, backwards=True),
    ExpertCase(gate_up(16), (17, 0, 16), features=8, k=64),
    ExpertCase(down(8), (0, 2, 8, 11, 0), features=136, k=192, backwards=True),
    ExpertCase(down(32), (33, 0, 4), features=16, k=64),
    ExpertCase(down(64, output="fp32"), (64, 3), features=132, k=64),
    ExpertCase(down(16, split_k=8, output="fp32"), (0, 3), features=16, k=1024),
    # Every width of a tile of 128, with more stages than the ring has.
    ExpertCase(gate_up(128), (0, 64, 65, 0, 225), features=8, k=832),
    ExpertCase(down(128), (96, 97, 0, 129), features=16, k=832, backwards=True),
    ExpertCase(gate_up(256), (0, 128, 129, 449), features=8, k=576),
    ExpertCase(down(256), (192, 0, 193, 257), features=16, k=576, backwards=True),
    # K split over a cluster: one SwiGLU of the whole sum.
    ExpertCase(gate_up(16, split_k=8, output="fp32"), (0, 3), features=16, k=1024),
    ExpertCase(down(8, split_k=4), (0, 9, 2), features=16, k=576),
    ExpertCase(gate_up(8, split_k=3), (0, 9, 1), features=72, k=448),
    ExpertCase(replace(down(8), max_ctas=2), (0, 2, 8, 11, 0), features=136, k=192),
    ExpertCase(down(32, split_k=2, output="fp32"), (3, 32), features=12, k=256),
    # Tokens taken from the rows of an unsorted matrix.
    ExpertCase(gather(8), (0, 1, 9, 0, 8, 0), features=72, k=192),
    ExpertCase(gather(16, output="fp32"), (17, 0, 3), features=16, k=64, backwards=True),
    ExpertCase(gather(8, split_k=3), (0, 9, 1), features=72, k=448),
    # Weights before the tokens: fewer and more stages than the ring has, clusters without a tile, widths of a tile.
    ExpertCase(ahead(8), (0, 2, 8, 11, 0), features=136, k=192),
    ExpertCase(ahead(8, split_k=4), (0, 9, 2), features=16, k=576),
    ExpertCase(ahead(16, output="fp32"), (0, 0, 3), features=12, k=1088, backwards=True),
    ExpertCase(ahead(128), (96, 97, 0, 129), features=16, k=832),
    # One expert that all rows visit.
    ExpertCase(gate_up(8, grouped=False), (11,), features=72, k=192),
    ExpertCase(gate_up(16, split_k=2, grouped=False, output="fp32"), (18,), features=16, k=320),
    ExpertCase(gate_up(256, grouped=False), (5,), features=8, k=64),
]
MORE = [
    ExpertCase(gate_up(64), (64, 3), features=16, k=64),
    ExpertCase(gate_up(128), (1, 129), features=8, k=64),
    ExpertCase(down(16, output="fp32"), (5, 16), features=12, k=64),
    ExpertCase(down(8, output="fp32"), (0, 2, 8, 11, 0), features=136, k=192, backwards=True),
    ExpertCase(down(128, output="fp32"), (1, 129), features=8, k=64),
    ExpertCase(down(128), (128, 0, 2), features=8, k=64),
    ExpertCase(down(256, output="fp32"), (5, 256), features=12, k=64),
    ExpertCase(gate_up(8, split_k=2), (0, 9, 1), features=72, k=320),
    ExpertCase(gather(8), (3, 2, 1, 5, 8), features=136, k=704),
    ExpertCase(ahead(256), (5, 257), features=8, k=576),
]
"""The same at other tiles."""


def name(case: ExpertCase) -> str:
    shape = case.shape
    kind = "gate up" if shape.gated else "down"
    kind += " ahead" * case.shape.counts_ahead
    kind += f" split {shape.split_k}" * (shape.split_k > 1) + " backwards" * case.backwards
    return f"{kind} {shape.token_tile} {shape.output} {case.counts} {case.features}x{case.k}"


@pytest.mark.parametrize("case", [*CASES, *full(*MORE)], ids=name)
def test_equals_fp64_after_rounding(case: ExpertCase) -> None:
    case.check()


GATHERING = "gathering starved"
"""A mode for shapes that gather: no other copies by cp.async."""
MODES = {
    "random": (Options("random", 1), 2),
    "loads starved": (Options("starved", 2, "tma_load"), 1),
    "stores starved": (Options("starved", 3, "tma_store"), 1),
    "tensor core starved": (Options("starved", 4, "warpgroup"), 1),
    GATHERING: (Options("starved", 5, "cp_async"), 2),
}
"""When engines act, and on how many clusters."""
TIMED = [
    gate_up(8),
    down(8),
    ahead(8),
    ahead(8, split_k=2),
    gate_up(8, split_k=2),
    gather(8),
    gather(16),
    gather(8, split_k=2),
]
TIMED_IN = [(shape, mode) for shape in TIMED for mode in MODES if shape.gathers or mode != GATHERING]
REPEATED = [(shape, mode) for shape in (down(8), ahead(8)) for mode in list(MODES)[1:4]]
REPEATED += [(gather(16), mode) for mode in list(MODES)[1:4]]
"""Their kernels have what others have that run in each mode: those that split K, or gather."""


@pytest.mark.parametrize(("shape", "mode"), but_for(TIMED_IN, *REPEATED), ids=str)
def test_results_do_not_depend_on_timing(shape: KernelShape, mode: str) -> None:
    """Three tiles or more, a full one and an empty expert among them."""
    ExpertCase(shape, (0, 16, 3), features=40, k=448).check(*MODES[mode])


TRIMMED_IN = [(shape, mode) for shape in (gate_up(128), down(256)) for mode in MODES if mode != GATHERING]
TRIMMED_IN += [(down(128, output="fp32"), mode) for mode in ("random", "stores starved")]
"""fp32 results differ by what is stored alone."""
TRIMMED_REPEATED = [(gate_up(128), "random"), (down(128, output="fp32"), "random")]
TRIMMED_REPEATED += [(down(256), mode) for mode in ("random", "loads starved", "tensor core starved")]


@pytest.mark.parametrize(("shape", "mode"), but_for(TRIMMED_IN, *TRIMMED_REPEATED), ids=str)
def test_results_of_trimmed_tiles_do_not_depend_on_timing(shape: KernelShape, mode: str) -> None:
    """A CTA goes from a width to a narrower one, to a whole tile and back."""
    counts = tuple(shape.token_tile // 128 * count for count in (96, 33, 128, 0, 65, 1))
    ExpertCase(shape, counts, features=8, k=576).check(MODES[mode][0], clusters=1)


WIDTHS = [(128, 1, 64), (128, 64, 64), (128, 65, 96), (128, 96, 96), (128, 97, 128), (128, 128, 128)]
WIDTHS += [(256, 1, 128), (256, 129, 192), (256, 193, 256)]


@pytest.mark.parametrize(("tile", "rows", "width"), WIDTHS)
def test_as_many_tokens_are_read_as_are_multiplied(tile: int, rows: int, width: int) -> None:
    """The bytes of an expert's last tile, loaded and stored, alone and behind a whole tile."""
    for before in (0, tile):
        statistics = ExpertCase(down(tile), (before + rows,), features=8, k=256).check()
        tiles = 1 + (before > 0)
        assert statistics.engine_bytes["tma_load"] == tiles * 128 * 256 * 9 // 16 + (before + width) * 256 * 2
        assert statistics.engine_bytes["tma_store"] == (before + width) * 8 * 2


@pytest.mark.parametrize("shape", [gather(16), down(16)], ids=str)
def test_tiles_of_16_are_multiplied_half_or_whole(shape: KernelShape) -> None:
    """On either side of 8 tokens, alone and behind a whole tile; a CTA goes from one width to the other and back."""
    ExpertCase(shape, (8, 9, 0, 16, 24, 25, 1), features=16, k=192).check(clusters=1)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (8, 8), (9, 16), (16, 16)])
@pytest.mark.parametrize("shape", [gather(16), down(16)], ids=str)
def test_a_tile_of_16_is_multiplied_as_wide_as_its_tokens_need(shape: KernelShape, rows: int, width: int) -> None:
    """By warpgroups: each of the eight warps has eight wgmmas a stage, which are of one width in the whole tile."""
    statistics = ExpertCase(shape, (rows,), features=8, k=128).check()
    multiplied = {code: count for code, count in statistics.by_opcode().items() if "mma" in code and "m64n" in code}
    assert len(multiplied) == 1, multiplied
    ((code, count),) = multiplied.items()
    assert f"m64n{width}k16" in code and count == 8 * 8


@pytest.mark.parametrize("shape", [gather(16), down(16), ahead(16, output="fp32")], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_token_stays_in_its_row(value: float, shape: KernelShape) -> None:
    """Some in each width of a tile, the first and the last of a tile among them."""
    case = ExpertCase(shape, (8, 16, 3), features=16, k=192)
    call, weights = case.build()
    kept, (first, second, _) = call.tokens.clone(), case.rows()
    bad = [first.stop - 1, second.start, second.start + 9]
    places = bad if call.sources is None else call.sources[bad].tolist()
    call.tokens[places] = value
    run(call)
    taken = call.sources if call.sources is not None else torch.arange(call.rows)
    rows = torch.isin(taken, torch.tensor(places))
    assert not call.out[bad].isfinite().any() or shape.gated
    good = case.build()[0]
    run(good)
    call.out[rows] = good.out[rows]
    call.tokens.copy_(kept)
    case.compare(call, weights)


@pytest.mark.parametrize("loudness", [-12.0, 2.0])
def test_the_limit_acts_where_it_must(loudness: float) -> None:
    """Quiet gates and ups all stay below it; of loud ones many are beyond it, on either side."""
    case = ExpertCase(gate_up(8), (8, 5), features=64, k=128, loudness=loudness)
    call, weights = case.build()
    (gates, ups), *_ = case.factored(call, weights)
    beyond = [np.mean(values > 10) for values in (gates.values, -gates.values, ups.values, -ups.values)]
    assert (min(beyond) > 0.05) if loudness > 0 else (max(beyond) == 0)
    case.check()


@pytest.mark.parametrize("shape", [down(8), gate_up(8, split_k=2), gather(8), gather(16, split_k=2)], ids=str)
def test_no_expert_has_a_token(shape: KernelShape) -> None:
    statistics = ExpertCase(shape, (0, 0, 0), features=128, k=256).check(clusters=2)
    assert statistics.engine_bytes["tma_load"] == statistics.engine_bytes["tma_store"] == 0


@pytest.mark.parametrize("counts", [(1, 0, 0), (0, 8, 0, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("token_tile", [8, 16])
def test_more_ctas_than_tiles(token_tile: int, overlap: bool, counts: tuple[int, ...]) -> None:
    """The last experts, or all, have no token: a CTA without a tile reads nothing behind the rows."""
    case = ExpertCase(gather(token_tile), counts, features=8, k=128, spare=0 if any(counts) else 1)
    case.check(Options(overlap=overlap), clusters=3)


def test_only_experts_with_tokens_are_read() -> None:
    """Their weights once; rows of whole tiles are written."""
    statistics = ExpertCase(gate_up(8), (0, 5, 0, 0, 1), features=64, k=256).check()
    assert statistics.engine_bytes["tma_load"] == 2 * (128 * 256 * 9 // 16 + 8 * 256 * 2)
    assert statistics.engine_bytes["tma_store"] == 2 * 8 * 64 * 2


def test_most_experts_there_can_be() -> None:
    """512 experts; the first and last, and some around the ends of runs of 16, have tokens."""
    counts = [0] * 512
    for expert in (0, 15, 16, 31, 255, 256, 510, 511):
        counts[expert] = 1 + expert % 9
    ExpertCase(down(8), tuple(counts), features=8, k=64, spare=0).check(clusters=2)


def test_a_limit_is_for_gated_kernels() -> None:
    from nvfp4_sgl.cutedsl_kernels.sm90.epilogue import Epilogue
    from nvfp4_sgl.cutedsl_kernels.sm90.gemm import W4A16Gemm

    for shape, limit in ((down(8), 10.0), (gate_up(8), None)):
        with pytest.raises(ValueError, match=f"limit: expected one for gated kernels only, found {limit}"):
            W4A16Gemm(shape, Epilogue(limit))


# Planted mistakes.

MUTATED = ExpertCase(gate_up(8), (0, 7, 8), features=16, k=128)
Swiglu = Callable[[Any, Any, float], Any]
SWIGLUS: dict[str, Callable[[Swiglu], Swiglu]] = {
    "gate and up swapped": lambda right: lambda gate, up, limit: right(up, gate, limit),
    "no limit": lambda right: lambda gate, up, limit: right(gate, up, 2.0**60),
}


@pytest.mark.parametrize("output", ["bf16", "fp32"])
def test_a_token_of_nan_gives_zeros(output: Output) -> None:
    """Not the limit, which a minimum without NaN would make of it; the other rows are as ever."""
    case = ExpertCase(gate_up(8, output=output), (3, 9), features=72, k=192)
    call, weights = case.build()
    kept = call.tokens.clone()
    call.tokens[1], call.tokens[18] = float("nan"), float("nan")
    run(call)
    for row in (1, 18):
        assert not call.out[row].any()
        expected = poisoned(call.rows, case.features, output=output)
        call.out[row] = expected[row]
    call.tokens.copy_(kept)
    wrong = [
        ~swiglu(*parts).allows(call.out[rows])
        for rows, parts in zip(case.rows(), case.factored(call, weights), strict=True)
    ]
    assert [np.unique(np.argwhere(found)[:, 0]).tolist() for found in wrong] == [[1], [2]]


@pytest.mark.parametrize("mistake", SWIGLUS)
def test_another_swiglu_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nvfp4_sgl.cutedsl_kernels.sm90 import epilogue

    case = MUTATED
    monkeypatch.setattr(epilogue, "clamped_swiglu", SWIGLUS[mistake](epilogue.clamped_swiglu))
    with pytest.raises(AssertionError, match="wrong"):
        case.check(compiled=compile_anew(case.shape))


def test_swapped_alphas_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvfp4_sgl.cutedsl_kernels.sm90.epilogue import DeviceEpilogue

    right = DeviceEpilogue.factors
    monkeypatch.setattr(DeviceEpilogue, "factors", lambda self, *where: right(self, *where)[::-1])
    with pytest.raises(AssertionError, match="wrong"):
        MUTATED.check(compiled=compile_anew(MUTATED.shape))


class Changed(Fixed):
    """A tensor by expert that is read otherwise."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __getitem__(self, expert: Any) -> Any:
        return self.read(expert)


def misplaced(monkeypatch: pytest.MonkeyPatch, field: str, read: Callable[[Any, Any, Any], Any]) -> None:
    """Compile kernels whose schedule reads offsets or counts by ``read(tensor, expert, experts)``."""
    from nvfp4_sgl.cutedsl_kernels.sm90 import gemm

    right = gemm.GroupedSchedule

    def make(*arguments: Any) -> Any:
        schedule = right(*arguments)
        tensor = getattr(schedule, field)
        changed: dict[str, Any] = {field: Changed(lambda expert: read(tensor, expert, schedule.experts))}
        return replace(schedule, **changed)

    monkeypatch.setattr(gemm, "GroupedSchedule", make)


def test_rows_of_the_next_expert_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import cutlass

    case = ExpertCase(down(8), (8, 3, 5), features=136, k=64)
    misplaced(monkeypatch, "offsets", lambda offsets, expert, count: offsets[cutlass.min(expert + 1, count - 1)])
    with pytest.raises(AssertionError, match="wrong"):
        case.check(compiled=compile_anew(case.shape))


@pytest.mark.parametrize("shape", [down(8), gate_up(8, split_k=2)], ids=str)
def test_a_row_more_of_a_full_expert_is_noticed(shape: KernelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tile behind it alone: other experts' rows come later, and overwrite what is wrong."""
    case = ExpertCase(shape, (shape.token_tile, 3), features=16, k=256)
    misplaced(monkeypatch, "counts", lambda counts, expert, _: counts[expert] + 1)
    mutant = compile_anew(shape)
    with pytest.raises(AssertionError, match="nobody's rows were written"):
        case.check(compiled=mutant)
    replace(case, spare=0).check(compiled=mutant)


def test_a_table_that_is_not_waited_for_is_noticed() -> None:
    """Warps read what one of them has written of the experts."""
    case = ExpertCase(down(8), (8, 3), features=16, k=64)
    (_, mutant), *others = without_each(compile_shape(case.shape), r"bar(?:rier)?(?:\.cta)?\.sync")
    assert not others
    with pytest.raises(EmulatorError):
        case.check(compiled=mutant)
