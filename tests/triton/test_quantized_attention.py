"""The output of attention in NVFP4: what the reference makes of the bf16 output, however the work is dealt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats.nvfp4 import quantize_rows
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.attention.sparse_attention import new_partials
from nvfp4_sgl.triton_kernels.attention.tiling import (
    BLACKWELL,
    HOPPER,
    SIXTEEN_HEADS,
    THIRTY_TWO_HEADS,
    Tiling,
    default_tiling,
    fuses_quantization,
)
from tests.triton.support.attention import Problem, check, cos_sin_of, named, problem
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.rows import poisoned_rows, require_quantized

FREQUENCIES = inverse_frequencies(64, 160000.0)


def check_quantized(case: Problem, groups: int, device: str, *, token_tile: int = 8, **options: Any) -> Tensor:
    """Beside the bf16 output and alone; returns that output."""
    tokens, heads = case.q.shape[:2]
    plain = case.run(device, **options)
    out = torch.full_like(case.q, float("nan"), device=device)
    for given in (out, None):
        rows = poisoned_rows(tokens, heads // groups * 512, device, token_tile, groups=groups)
        case.launch(device, out=given, out_rows=rows, **options)
        require_quantized(rows, plain.view(tokens, groups, -1))
    assert torch.equal(out.cpu(), plain)
    return plain


def cos_sin(tokens: int) -> Tensor:
    return cos_sin_of(torch.arange(tokens) * 70_001 % 1_048_576, FREQUENCIES)


@pytest.mark.parametrize(
    ("tiling", "heads", "groups"),
    [
        (SIXTEEN_HEADS, 8, 1),
        (SIXTEEN_HEADS, 4, 2),
        (SIXTEEN_HEADS, 24, 3),
        (SIXTEEN_HEADS, 32, 2),
        (THIRTY_TWO_HEADS, 32, 4),
        (THIRTY_TWO_HEADS, 24, 3),
        (HOPPER, 16, 16),
        (HOPPER, 72, 9),
        (BLACKWELL, 128, 16),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else named(value),
)
def test_heads_and_groups(tiling: Tiling, heads: int, groups: int, device: str) -> None:
    if device != "cpu" and tiling == BLACKWELL != default_tiling(64, packed=True):
        pytest.skip("another architecture's")
    case = problem(heads, [40, 30], tokens=2, seed=heads)
    check_quantized(case, groups, device, tiling=tiling, splits=1, cos_sin=cos_sin(2))


@pytest.mark.parametrize(
    ("tiling", "heads", "splits"),
    [
        (SIXTEEN_HEADS, 8, 2),
        (SIXTEEN_HEADS, 24, 3),
        (SIXTEEN_HEADS, 16, 9),
        (SIXTEEN_HEADS, 8, 40),
        (THIRTY_TWO_HEADS, 32, 2),
        (THIRTY_TWO_HEADS, 24, 5),
        (HOPPER, 64, 2),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else named(value),
)
def test_split_keys(tiling: Tiling, heads: int, splits: int, device: str) -> None:
    """Every width of a share; the counters serve again."""
    tiles = min(splits, 36)
    case = problem(heads, [tiling.keys + 3, (tiles - 2) * tiling.keys + 5], tokens=1, seed=splits)
    counters = torch.zeros(heads, dtype=torch.int32, device=device)
    check_quantized(
        case, heads // 8, device, tiling=tiling, splits=splits, cos_sin=cos_sin(1), query_eps=1e-6, semaphores=counters
    )
    assert not counters.any()


@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 130])
def test_ragged_batches(tokens: int, device: str) -> None:
    """As chosen for the sizes, in the layouts of narrow and of wide token tiles."""
    case = problem(2, [20], tokens=tokens, seed=tokens)
    lengths = torch.where(torch.arange(tokens) % 9 == 0, 20, 0).int()
    out = torch.full_like(case.q, float("nan"), device=device)
    rows = poisoned_rows(tokens, 1024, device, 8 if tokens < 17 else 128, groups=1)
    case.launch(device, out=out, out_rows=rows, window_lengths=lengths)
    require_quantized(rows, out.view(tokens, 1, -1))


def test_lists_of_any_length(device: str) -> None:
    """Queries that see nothing, one tile (whose program is alone), and more, all with keys split in six."""
    case = problem(8, [70, 130], tokens=5)
    ends: dict[str, Any] = {
        "window_lengths": torch.tensor([0, 1, 33, 70, 32]).int(),
        "extra_lengths": torch.tensor([0, 0, 64, 130, 0]).int(),
    }
    plain = check_quantized(case, 2, device, tiling=SIXTEEN_HEADS, splits=6, cos_sin=cos_sin(5), **ends)
    assert (plain[0] == 0).all() and (plain[1:] != 0).any(-1).all()


def test_outliers_and_groups_apart(device: str) -> None:
    """Groups of very different size: a scale that took in another group's heads would lose the small ones."""
    case = problem(16, [70], tokens=1)
    case.q[:, :8] = 0
    case.sink[:8] = 60.0
    for splits in (1, 2):
        plain = check_quantized(case, 2, device, tiling=SIXTEEN_HEADS, splits=splits)
        scales = quantize_rows(plain.view(2, -1)).global_scale
        assert float(scales[1] / scales[0]) > 1e10
    check(case, device, splits=1)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_what_is_not_finite(device: str) -> None:
    """Keys are finite up to 2^127; sums of plain rows may be infinite or NaN: the largest bf16, and 0."""
    case = problem(8, [40], tokens=1, packed=False, holes=0.0)
    rows = case.entries[0].pages.view(-1, 512)
    rows[case.slots[0][0, 3], 17] = torch.inf
    rows[case.slots[0][0, 4], 490] = torch.nan
    for splits in (1, 2):
        out = torch.zeros_like(case.q, device=device)
        found = poisoned_rows(1, 4096, device, 8, groups=1)
        case.launch(device, out=out, out_rows=found, tiling=SIXTEEN_HEADS, splits=splits)
        assert not out.isfinite().all()
        require_quantized(found, out.view(1, 1, -1))


def test_no_order_of_programs_shows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_backwards(monkeypatch)
    counters = torch.zeros(32, dtype=torch.int32, device=device)
    case = problem(16, [70, 130], tokens=2)
    check_quantized(case, 2, device, tiling=SIXTEEN_HEADS, splits=5, semaphores=counters)
    assert not counters.any()


def test_no_queries(device: str) -> None:
    case = problem(8, [64], tokens=1)
    empty = Problem(case.q[:0], case.sink, case.entries, case.stores, [case.slots[0][:0]])
    empty.launch(device, out_rows=Rows.allocate(0, 4096, 8, device, groups=1))


def test_which_groups_are_quantised_here() -> None:
    assert all(fuses_quantization(heads, groups) for heads, groups in ((64, 8), (128, 16), (8, 1), (16, 2), (4, 2)))
    assert not any(fuses_quantization(heads, groups) for heads, groups in ((64, 2), (24, 1), (8, 3), (8, 0)))


def test_refusals(device: str) -> None:
    case = problem(8, [40, 40], tokens=2)
    good = Rows.allocate(2, 4096, 8, device, groups=1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "out: expected out, out_rows or both"),
        ({"out_rows": Rows.allocate(2, 4096, 8, device)}, "out_rows.codes: expected shape"),
        ({"out_rows": Rows.allocate(2, 2048, 8, device, groups=1)}, "out_rows.codes: expected shape"),
        ({"out_rows": Rows.allocate(3, 4096, 8, device, groups=1)}, "out_rows.codes: expected shape"),
        ({"out_rows": Rows.allocate(2, 512, 8, device, groups=3)}, "groups of 1, 2, 4, 8 or 16 heads"),
        ({"out_rows": good, "splits": 2, "partials": new_partials(case.q, 2)}, "partials.stats: expected shape"),
    ]
    for changes, message in refused:
        with pytest.raises(OperandError, match=message):
            case.launch(device, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@pytest.mark.parametrize(("tokens", "extra"), [(1, 8192), (3, 200), (8, 1024), (64, 512), (300, 512)])
def test_serving_sizes(heads: int, tokens: int, extra: int, device: str) -> None:
    """Programs that wait for each other twice, launch after launch on the same counters."""
    case = problem(heads, [128, extra], tokens=tokens, seed=tokens)
    counters = torch.zeros(tokens * heads, dtype=torch.int32, device=device)
    lengths = torch.arange(tokens, dtype=torch.int32) * 37 % 129
    options: dict[str, Any] = {
        "cos_sin": cos_sin(tokens),
        "query_eps": 1e-6,
        "semaphores": counters,
        "window_lengths": lengths,
    }
    for _ in range(3):
        check_quantized(case, heads // 8, device, token_tile=128, **options)
        assert not counters.any()
