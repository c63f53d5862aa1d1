"""Attention whose keys are split among programs: how many parts there are and how they are added; the tilings."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.attention.sparse_attention import new_partials
from nvfp4_sgl.triton_kernels.attention.tiling import (
    HOPPER,
    HOPPER_PLAIN,
    HOPPER_TWO_TILES,
    SIXTEEN_HEADS,
    THIRTY_TWO_HEADS,
    Tiling,
    choose_splits,
    choose_tiling,
    default_tiling,
    most_splits,
)
from tests.triton.support.attention import BOUND, Problem, check, cos_sin_of, named, problem
from tests.triton.support.interpreter import run_backwards

HCA = 128
LONG = (128, 8192)
"""Columns of a graph's HCA layers for a million tokens; ``HCA`` of the second are expected to count."""


def test_given_partials_are_used(device: str) -> None:
    case = problem(8, [70, 30], tokens=1)
    partials = new_partials(case.q.to(device), 3)
    assert partials is not None
    for part in partials:
        part.fill_(float("nan"))
    out = case.run(device, splits=3, partials=partials)
    assert torch.equal(out, case.run(device, splits=3))
    assert not partials.stats.isnan().any()
    assert new_partials(case.q, 1) is None


@pytest.mark.parametrize(
    ("tiling", "heads", "tiles", "numbers"),
    [(SIXTEEN_HEADS, 8, 33, (3, 6, 20, 40)), (THIRTY_TWO_HEADS, 20, 9, (3, 9)), (HOPPER, 20, 9, (3, 9))],
    ids=["few heads", "half", "many heads"],
)
def test_parts_of_any_number(tiling: Tiling, heads: int, tiles: int, numbers: tuple[int, ...], device: str) -> None:
    """Every width of a share, shares that programs have more than one of, and programs that have none.

    Heads end within a block. The counters serve again.
    """
    case = problem(heads, [tiling.keys + 3, (tiles - 3) * tiling.keys + 5], tokens=1, seed=2)
    cos_sin = cos_sin_of(torch.tensor([70_001]), inverse_frequencies(64, 10000.0))
    counters = torch.zeros(heads + 7, dtype=torch.int32, device=device)
    whole = case.run(device, tiling=tiling, splits=1, cos_sin=cos_sin)
    _, size = case.exact()
    size[..., 448:] = size[..., 448:].unflatten(-1, (32, 2)).sum(-1, keepdim=True).expand(1, heads, 32, 2).flatten(-2)
    for splits in numbers:
        found = case.run(device, tiling=tiling, splits=splits, cos_sin=cos_sin, semaphores=counters)
        assert ((found.double() - whole.double()).abs() <= 2 * BOUND * size).all(), splits
        # Weights are rounded under another maximum, and little else differs.
        assert torch.allclose(found.float(), whole.float(), rtol=2**-6, atol=float(size.max()) * 2**-8), splits
        assert not counters.any()


def test_parts_of_lists_of_any_length(device: str) -> None:
    """Queries that see no tile, one, fewer than there are parts, and more; each as if it were alone."""
    case = problem(8, [70, 130], tokens=4)
    ends = {"window_lengths": torch.tensor([0, 1, 33, 70]).int(), "extra_lengths": torch.tensor([0, 0, 64, 130]).int()}
    together = case.run(device, tiling=SIXTEEN_HEADS, splits=6, **ends)
    assert (together[0] == 0).all()
    for slots, length in zip(case.slots, ends.values(), strict=True):
        slots[torch.arange(slots.shape[1]) >= length[:, None]] = -1
    check(case, device, tiling=SIXTEEN_HEADS, splits=6)
    for token in range(4):
        alone = Problem(
            case.q[token : token + 1], case.sink, case.entries, case.stores, [s[token : token + 1] for s in case.slots]
        )
        own = {name: length[token : token + 1] for name, length in ends.items()}
        assert torch.equal(alone.run(device, tiling=SIXTEEN_HEADS, splits=6, **own), together[token : token + 1])


def test_no_order_of_programs_shows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = problem(20, [70, 130], tokens=2)
    counters = torch.zeros(2 * 20, dtype=torch.int32, device=device)
    options = {"tiling": SIXTEEN_HEADS, "splits": 5, "semaphores": counters}
    forwards = case.run(device, **options)
    run_backwards(monkeypatch)
    assert torch.equal(case.run(device, **options), forwards)
    assert not counters.any()


@pytest.mark.parametrize("tiling", [SIXTEEN_HEADS, THIRTY_TWO_HEADS], ids=named)
def test_heads_end_within_a_block(tiling: Tiling, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last query's programs run first: what others store beyond their last head falls on its heads."""
    run_backwards(monkeypatch)
    check(problem(20, [20], tokens=2), device, tiling=tiling, splits=1)


def test_splits_fill_the_chip() -> None:
    def splits(queries: int, heads: int, *columns: int) -> int:
        return choose_splits(queries, heads, columns, 132)

    assert splits(8192, 64, 128, 512) == 1
    assert splits(132, 64, 128, 512) == 1
    assert splits(1, 64, 128) == 1  # two tiles are not worth a second kernel
    assert splits(1, 64, 128, 512) == 10  # a tile each
    assert 64 <= splits(1, 64, 128, 8192) <= 132
    assert splits(64, 64, 128, 512) == splits(32, 128, 128, 512) == 2
    assert splits(1, 8, 0) == 1
    for queries in (1, 3, 8, 64, 100, 256):
        assert 1 <= splits(queries, 128, 128, 1024) <= 18
    assert choose_splits(1, 8, (128, 512), 132, SIXTEEN_HEADS) == 20
    assert choose_splits(1, 64, (128, 8192), 132, SIXTEEN_HEADS) <= 66


@pytest.mark.parametrize("tiling", [HOPPER, SIXTEEN_HEADS, THIRTY_TWO_HEADS], ids=named)
@pytest.mark.parametrize("queries", [1, 3, 8, 33, 64, 100, 8192])
def test_programs_of_split_keys_all_have_a_place(queries: int, tiling: Tiling) -> None:
    """They wait for one another."""
    for heads in (8, 24, 32, 64, 128):
        splits = choose_splits(queries, heads, (128, 8192), 132, tiling)
        programs = queries * -(-heads // tiling.heads) * splits
        assert splits == 1 or programs <= 132 * tiling.resident
        assert splits <= most_splits(queries, heads, 132, tiling)
    assert most_splits(2, 64, 132, HOPPER) == 66
    assert most_splits(2, 65, 132, SIXTEEN_HEADS) == 26


def test_the_measured_tilings() -> None:
    """What was fastest on an H200, by the rule that follows from it: of splits those of 32 heads were measured."""
    for queries, heads, columns, expected, splits in [
        (1, 32, (128, 8), SIXTEEN_HEADS, 5),
        (1, 32, (128, 512), SIXTEEN_HEADS, 20),
        (4, 32, (128, 512), SIXTEEN_HEADS, 16),
        (16, 32, (128, 8), SIXTEEN_HEADS, 4),
        (16, 32, (128, 256), SIXTEEN_HEADS, 4),
        (16, 32, (128, 512), THIRTY_TWO_HEADS, 8),
        (32, 32, (128, 256), THIRTY_TWO_HEADS, 4),
        (32, 32, (128, 512), THIRTY_TWO_HEADS, 4),
        (64, 32, (128, 8), SIXTEEN_HEADS, 1),
        (64, 32, (128, 256), THIRTY_TWO_HEADS, 2),
        (64, 32, (128, 512), THIRTY_TWO_HEADS, 4),
        (1024, 32, (128, 512), THIRTY_TWO_HEADS, 1),
        (1, 64, (128,), SIXTEEN_HEADS, 4),
        (1, 64, (128, 512), SIXTEEN_HEADS, 20),
        (1, 64, (128, 1024), SIXTEEN_HEADS, 18),
        (1, 64, LONG, SIXTEEN_HEADS, 65),
        (2, 64, LONG, SIXTEEN_HEADS, 33),
        (16, 64, LONG, SIXTEEN_HEADS, 4),
        (64, 64, LONG, HOPPER, 2),
        (16, 32, LONG, SIXTEEN_HEADS, 8),
        (64, 32, LONG, SIXTEEN_HEADS, 2),
        (128, 32, LONG, THIRTY_TWO_HEADS, 2),
        (4, 64, (128, 512), SIXTEEN_HEADS, 8),
        (8, 64, (128,), SIXTEEN_HEADS, 4),
        (8, 64, (128, 512), HOPPER, 10),
        (8, 64, LONG, SIXTEEN_HEADS, 8),
        (16, 64, (128,), SIXTEEN_HEADS, 1),
        (16, 64, (128, 512), HOPPER, 8),
        (32, 64, (128,), SIXTEEN_HEADS, 1),
        (64, 64, (128,), HOPPER_TWO_TILES, 1),
        (64, 64, (128, 512), HOPPER, 2),
        (256, 64, (128,), HOPPER, 1),
        (256, 64, (128, 512), HOPPER, 1),
        (8192, 64, (128, 512), HOPPER, 1),
        (1, 128, (128,), SIXTEEN_HEADS, 4),
        (1, 128, (128, 1024), SIXTEEN_HEADS, 16),
        (8, 128, (128,), SIXTEEN_HEADS, 1),
        (8, 128, (128, 1024), HOPPER, 8),
        (64, 128, (128,), HOPPER_TWO_TILES, 1),
        (8192, 8, (128, 512), SIXTEEN_HEADS, 1),
    ]:
        tiling = choose_tiling(queries, heads, columns, 132, packed=True, expected=HCA if columns == LONG else None)
        if default_tiling(64, packed=True) != HOPPER and expected != SIXTEEN_HEADS:
            continue
        assert tiling == expected, (queries, heads, columns)
        assert choose_splits(queries, heads, columns, 132, tiling) == splits, (queries, heads, columns)


def test_32_heads_have_one_tiling_beside_that_of_few_queries() -> None:
    if default_tiling(64, packed=True) != HOPPER:
        pytest.skip("another architecture's")
    for heads, expected in ((16, SIXTEEN_HEADS), (17, THIRTY_TWO_HEADS), (32, THIRTY_TWO_HEADS), (33, HOPPER)):
        assert default_tiling(heads, packed=True) == expected
        assert choose_tiling(8192, heads, (128, 512), 132, packed=True) == expected
    assert default_tiling(32, packed=False) == HOPPER_PLAIN


@pytest.mark.parametrize("heads", [8, 32, 64, 128])
def test_a_step_and_the_graph_that_pads_it_split_alike(heads: int) -> None:
    """SGLang captures the powers of two and sizes between them; a step runs in the least graph that holds it."""
    captured = [1, 2, 4, 8, 12, 16, 24, 32, *range(40, 257, 8)]
    for queries in range(1, 257):
        graph = min(size for size in captured if size >= queries)
        for columns in ((128,), (128, 512), (128, 8192)):
            expected = HCA if columns == LONG else None
            alone, padded = (
                (
                    tiling := choose_tiling(count, heads, columns, 132, packed=True, expected=expected),
                    choose_splits(count, heads, columns, 132, tiling),
                )
                for count in (queries, graph)
            )
            assert alone == padded


@pytest.mark.gpu
def test_more_programs_than_have_a_place_are_refused(device: str) -> None:
    """Waiting for one that has no place, they would never end."""
    case = problem(64, [64, 64], tokens=2)
    most = most_splits(2, 64, torch.cuda.get_device_properties(device).multi_processor_count, HOPPER)
    check(case, device, tiling=HOPPER, splits=most)
    with pytest.raises(OperandError, match=rf"splits: .*{most}\], found {most + 1}"):
        case.run(device, tiling=HOPPER, splits=most + 1)
