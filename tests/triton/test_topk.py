"""The best entries of each query: the reference's choice, ties to the lower entry, whatever lies around."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.limits import CHUNK_SCORES
from nvfp4_sgl.triton_kernels.indexer import topk as topk_module
from nvfp4_sgl.triton_kernels.indexer.topk import (
    KEPT_MAX,
    MAX_REGISTERS,
    THREADS,
    Candidates,
    new_candidates,
    select_entries,
)
from tests.triton.support.interpreter import run_backwards
from tests.triton.support.launches import Launches
from tests.triton.support.passes import Pass, new_pass
from tests.triton.support.resources import resources


def at_sight(visible: list[int]) -> list[tuple[int, int]]:
    """Spans of decoding requests that see so many entries, some of them with a window begun."""
    ends = [4 * count + index % 4 if count else 1 for index, count in enumerate(visible)]
    return [(end - 1, end) for end in ends]


def best(scores: Tensor, entries: Tensor, topk: int) -> list[int]:
    """Slots of one query's ``topk`` largest scores in order of the entries, ties to the lower entry."""
    order = sorted(enumerate(scores.tolist()), key=lambda pair: (math.isnan(pair[1]), -pair[1]))  # stable
    return entries[sorted(index for index, _ in order[:topk])].tolist()


def choose(
    made: Pass,
    scores: Tensor,
    topk: int,
    *,
    first: int = 0,
    candidates: Candidates | None = None,
    poison: tuple[int, int] = (-77, -77),
    unseen: float = math.nan,
) -> tuple[Tensor, Tensor]:
    """What the kernel makes of the scores.

    Args:
        poison: bits of scores and entries that stand in ``candidates`` beforehand.
        unseen: score of all columns that a token does not see.
    """
    device = made.batch.positions.device
    visible = made.plan.csa_visible[first : first + len(scores)]
    poisoned = scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], unseen)
    guarded = torch.full((len(scores) + 1, topk), -77, dtype=torch.int32, device=device)
    slots = guarded[:-1]
    lengths = torch.full((len(scores),), -77, dtype=torch.int32, device=device)
    given = poisoned.to(device)
    candidates = candidates or new_candidates(len(scores), scores.shape[1], topk, device)
    for part, value in enumerate(poison):
        candidates.nominated[:, part] = value
    select_entries(given, made.batch, topk, slots, lengths, first=first, candidates=candidates)
    assert not candidates.semaphores.any()
    assert bool((guarded[-1] == -77).all()), "stored behind the last row"
    assert torch.equal(given.cpu().view(torch.int32), poisoned.view(torch.int32)), "scores were written to"
    return slots.cpu(), lengths.cpu()


def check(made: Pass, scores: Tensor, topk: int, **options: Any) -> None:
    """Compare with the best by sorting; ``options`` are those of :func:`choose`."""
    slots, lengths = choose(made, scores, topk, **options)
    first = options.get("first", 0)
    owners = made.batch.owners.cpu()
    for row in range(len(scores)):
        visible = int(made.plan.csa_visible[first + row])
        entries = made.plan.csa_entry_slots[owners[first + row]]
        count = min(visible, topk)
        assert int(lengths[row]) == count
        assert slots[row, :count].tolist() == best(scores[row, :visible], entries, topk)
        assert bool((slots[row, count:] == -1).all())


def random_scores(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("topk", [1, 2, 5, 8, 64, 100])
def test_visible_counts_around_topk(topk: int, device: str):
    visible = [0, 1, max(topk - 1, 0), topk, topk + 1, 2 * topk, 200]
    check(new_pass(at_sight(visible), device), random_scores(len(visible), 200), topk)


@pytest.mark.parametrize("topk", [512, 1024])
def test_real_sizes_in_one_launch(topk: int, device: str):
    visible = [topk - 1, topk, topk + 1, 2048, 2049, 5000, 4999]
    check(new_pass(at_sight(visible), device), random_scores(len(visible), 5000), topk)


@pytest.mark.parametrize("columns", [700, 5000, CHUNK_SCORES + 9])
def test_what_a_token_does_not_see_is_never_chosen(columns: int, device: str):
    visible = [65, 512, 699, columns - 1, columns]
    check(new_pass(at_sight(visible), device), random_scores(len(visible), columns), 64, unseen=math.inf)


@pytest.mark.parametrize("topk", [3, 512, 1024])
def test_rows_of_several_chunks(topk: int, device: str):
    visible = [
        2,
        topk,
        topk + 1,
        CHUNK_SCORES - 1,
        CHUNK_SCORES,
        CHUNK_SCORES + 1,
        CHUNK_SCORES + topk,
        2 * CHUNK_SCORES + 7,
    ]
    made, scores = new_pass(at_sight(visible), device), random_scores(len(visible), 2 * CHUNK_SCORES + 7)
    check(made, scores, topk)
    scores[-1] = torch.arange(2 * CHUNK_SCORES + 7).float()  # all of the best in the last chunks
    scores[-2] = -torch.arange(2 * CHUNK_SCORES + 7).float()
    scores[-3] = scores[-3].round()  # many ties, across chunks
    scores[-4] = 0.25
    check(made, scores, topk)
    scores[-1, 5:] = torch.nan
    scores[-2] = torch.nan
    scores[-3, 100 : 2 * CHUNK_SCORES : 3] = torch.nan
    check(made, scores, topk)


def test_blocks_of_every_size(device: str):
    """Rows at the edges of blocks and more candidates than a small block holds; the last entries are among the best."""
    visible = [
        4 * CHUNK_SCORES + 500,
        CHUNK_SCORES + 300,
        2 * KEPT_MAX + 1,
        2 * KEPT_MAX,
        CHUNK_SCORES,
        2 * CHUNK_SCORES,
    ]
    made, scores = new_pass(at_sight(visible), device), random_scores(6, 4 * CHUNK_SCORES + 500)
    scores[0, ::7] = scores[0, 3]
    for row, count in zip(scores, visible, strict=True):
        row[count - 3 : count] = 9.0
    check(made, scores, 1024)


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_rows_at_the_borders_of_small_chunks(order: str, monkeypatch: pytest.MonkeyPatch, device: str):
    """Whichever program comes last; rows that need no election beside those that do; the same candidates again."""
    chunk, topk = 256, 40
    monkeypatch.setattr(topk_module, "CHUNK_SCORES", chunk)
    if order == "backwards":
        run_backwards(monkeypatch)
    visible = [0, 39, 40, 41, 255, 256, 257, 256 + 40, 2 * 256 - 1, 2 * 256, 2 * 256 + 1, 3 * 256 + 1, 5 * 256]
    made = new_pass(at_sight(visible), device)
    candidates = new_candidates(16, 6 * 256, topk, device)
    for seed in range(2):
        scores = random_scores(len(visible), 5 * 256, seed)
        if seed:
            scores = scores.mul(3).round()
        check(made, scores, topk, candidates=candidates)
    assert not candidates.semaphores.any()


def test_a_last_chunk_of_few_scores_nominates_no_more(monkeypatch: pytest.MonkeyPatch, device: str):
    """What an earlier launch left behind a short chunk's nominations is better than any score, and is no candidate."""
    chunk, topk = 256, 40
    monkeypatch.setattr(topk_module, "CHUNK_SCORES", chunk)
    visible = [chunk + 1, chunk + topk - 1, 3 * chunk + 7]
    made, scores = new_pass(at_sight(visible), device), random_scores(3, 4 * chunk)
    candidates = new_candidates(3, 4 * chunk, topk, device)
    check(made, scores, topk, candidates=candidates, poison=(0x7F800000, 0))


def test_ties_go_to_the_lower_entry(device: str):
    made = new_pass(at_sight([300] * 5), device)
    scores = random_scores(5, 300)
    scores[0] = 1.5
    scores[1] = scores[1].round()
    scores[2] = 0.0
    scores[2, ::3] = -0.0  # equals +0
    scores[3] = -torch.inf
    scores[4, 50:] = scores[4, 49].clone()
    check(made, scores, 17)
    slots, _ = choose(made, scores, 17)
    assert torch.equal(slots[0].long(), made.plan.csa_entry_slots[0, :17])


@pytest.mark.parametrize("columns", [4100, 16001])
def test_ties_that_end_anywhere(columns: int, device: str):
    """More reach the threshold than are taken, the last of these in any part of a block; scores of all scales."""
    topk = 100
    ends = [topk, 2047, 2049, columns // 2, columns - 900, columns - 1]
    made, scores = new_pass(at_sight([columns] * len(ends)), device), -random_scores(len(ends), columns).abs()
    scores *= 2.0 ** torch.randint(-140, 120, (columns,), generator=torch.Generator().manual_seed(3))
    for row, end in zip(scores, ends, strict=True):
        row[end - topk // 2 : end] = 1.5  # the upper half of those taken is above
        row[[0, end, columns - 1]] = 1.25
        row[end - topk : end - topk // 2] = 1.25
    check(made, scores, topk)
    check(made, scores.round(), topk)


@pytest.mark.parametrize("topk", [100, 512])
def test_more_ties_than_are_kept(topk: int, device: str):
    """Too many scores are equal to the threshold for the quick way; larger ones lie before, among or behind them."""
    made, scores = new_pass(at_sight([5000, 4999, 5000, 3000]), device), torch.zeros(4, 5000)
    scores[0, -70:] = 1.0
    scores[1, ::61] = torch.arange(82.0)
    scores[2, 1::2] = -1.0
    scores[3, :40] = 2.0
    check(made, scores, topk)


def test_every_thread_finds_a_larger_one_among_too_many_ties(device: str):
    made, scores = new_pass(at_sight([5000]), device), torch.zeros(1, 5000)
    scores[0, :THREADS] = 1.0
    check(made, scores, THREADS + 88)


def test_numbers_of_every_kind(device: str):
    """Infinities, zeros, denormals and what is not a number, which comes last."""
    tiny = 2.0**-149
    kinds = torch.tensor([torch.inf, 3.4e38, 1.0, 2.0**-126, tiny, 0.0, -0.0, -tiny, -(2.0**-126), -3.4e38, -torch.inf])
    made = new_pass(at_sight([90] * 6), device)
    scores = kinds[torch.randint(len(kinds), (6, 90), generator=torch.Generator().manual_seed(1))]
    scores[4:, 7::3] = torch.nan
    scores[5, :80] = -torch.nan
    for topk in (1, 8, 33, 70, 89):
        check(made, scores, topk)


def test_early_maxima_of_one_group(device: str):
    """The largest scores lie where a strided group would hold them all, or none."""
    made = new_pass(at_sight([8192] * 3), device)
    scores = random_scores(3, 8192).abs()
    scores[0, 5::2048] += 100
    scores[1, :700] += 100
    scores[2, 2048:2600] += 100
    check(made, scores, 512)


KEPT = {
    "normal": lambda scores: scores,
    "exponential": lambda scores: scores.mul(3).exp(),
    "rising": lambda scores: scores.sort(dim=1).values,
    "falling": lambda scores: scores.sort(dim=1, descending=True).values,
    "best side by side": lambda scores: scores + (torch.arange(scores.shape[1]) // 1500 == 2) * 8.0,
    "few values": lambda scores: scores.round(),
    "few numbers": lambda scores: scores.masked_fill(torch.arange(scores.shape[1]) % 37 > 0, torch.nan),
    "equal": torch.zeros_like,
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_is_kept_first(kind: str, device: str):
    """However many reach the first bound, of rows that fill a block and of rows that do not."""
    visible = [
        KEPT_MAX,
        KEPT_MAX + 1,
        2 * KEPT_MAX,
        2 * KEPT_MAX + 1,
        4 * KEPT_MAX + 70,
        CHUNK_SCORES,
    ]
    made = new_pass(at_sight(visible), device)
    check(made, KEPT[kind](random_scores(6, CHUNK_SCORES, 5)), 512 if len(kind) % 2 else 1024)


def test_more_chosen_than_groups_hold_any(device: str):
    """Just above twice KEPT_MAX a block's last threads hold nothing."""
    made, scores = new_pass(at_sight([2 * KEPT_MAX + 1] * 3), device), random_scores(3, CHUNK_SCORES, 7)
    scores[1] = -3.0
    scores[2] = scores[2].masked_fill(torch.arange(CHUNK_SCORES) % 5 > 0, torch.nan)
    check(made, scores, 2048)


def test_one_kept_entry_a_thread(device: str):
    """Where few are chosen from a large block, each thread ends with one key, and its maxima are chains of keys."""
    made, scores = new_pass(at_sight([4100] * 2), device), random_scores(2, 4100, 8)
    scores[1] = -scores[1].abs()
    check(made, scores, 100)


def test_kept_entries_of_a_row_are_not_those_of_the_next(device: str):
    """What waits among the slots ends with its row, also where no row of slots has the alignment of the next."""
    made = new_pass(at_sight([2 * KEPT_MAX + 700] * 3), device)
    scores = random_scores(3, 2 * KEPT_MAX + 700, 6)
    scores[1] = scores[1].round()
    check(made, scores, 333)


def test_tokens_of_prompts_in_parts(device: str):
    """Several queries a request, in parts: each sees what its position allows."""
    made = new_pass([(40, 75), (0, 9), (130, 131), (64, 64 + 21)], device)
    scores = random_scores(made.batch.tokens, 40)
    for begin, end in ((0, 30), (30, 31), (31, made.batch.tokens)):
        check(made, scores[begin:end], 6, first=begin)


def test_more_visible_than_columns(device: str):
    """Memory outside the scores is left alone."""
    made = new_pass(at_sight([50, 12]), device)
    slots, lengths = choose(made, random_scores(2, 20), 8)
    assert lengths.tolist() == [8, 8]
    assert bool(torch.isin(slots[0].long(), made.plan.csa_entry_slots[0, :20]).all())


def test_agrees_with_the_reference(device: str):
    """On distinct scores: the sets of ``ops.indexer.select_entries``, which takes torch.topk."""
    made = new_pass(at_sight([700, 513, 512, 60]), device)
    scores = random_scores(4, 700)
    slots, _ = choose(made, scores, 512)
    hidden = torch.arange(700) >= made.plan.csa_visible[:, None]
    chosen = scores.masked_fill(hidden, -torch.inf).topk(512)
    expected = made.plan.csa_entry_slots.gather(1, chosen.indices).masked_fill(chosen.values == -torch.inf, -1)
    assert torch.equal(slots.long().sort().values, expected.sort().values)


def test_refusals(device: str):
    made = new_pass([(0, 5)], device)
    scores, slots = torch.zeros(5, 40, device=device), torch.zeros(5, 8, dtype=torch.int32, device=device)
    lengths = slots[:, 0].contiguous()
    for arguments, message in [
        ((scores.half(), made.batch, 8, slots, lengths), "scores: expected dtype"),
        ((scores.T, made.batch, 8, slots, lengths), "scores: expected the last dimension"),
        ((scores, made.batch, 4, slots, lengths), "slots: expected shape"),
        ((scores, made.batch, 8, slots.long(), lengths), "slots: expected dtype"),
        ((scores, made.batch, 8, slots, lengths[:4]), "lengths: expected shape"),
        ((scores, made.batch, 4096, slots, lengths), "topk: expected a value"),
        (
            (scores.new_zeros(5, 17 * CHUNK_SCORES), made.batch, 1024, slots.new_zeros(5, 1024), lengths),
            "chunks of scores",
        ),
    ]:
        with pytest.raises(OperandError, match=message):
            select_entries(*arguments)
    with pytest.raises(OperandError, match="first: expected a value"):
        select_entries(scores, made.batch, 8, slots, lengths, first=1)
    wide = scores.new_zeros(5, CHUNK_SCORES + 1)
    for candidates, message in [
        (None, "candidates: expected those of 2 chunks"),
        (new_candidates(4, CHUNK_SCORES + 1, 8, device), "candidates: expected at least 5 rows of 16 candidates"),
        (new_candidates(5, CHUNK_SCORES, 8, device), "candidates: expected at least 5 rows of 16 candidates"),
        (new_candidates(5, CHUNK_SCORES + 1, 7, device), "candidates: expected at least 5 rows of 16 candidates"),
    ]:
        with pytest.raises(OperandError, match=message):
            select_entries(wide, made.batch, 8, slots, lengths, candidates=candidates)


@pytest.mark.parametrize(
    ("begin", "stride", "aligned"), [(0, 200, True), (4, 200, True), (1, 200, False), (2, 200, False), (0, 202, False)]
)
def test_four_scores_at_once_only_of_aligned_rows(
    begin: int, stride: int, aligned: bool, monkeypatch: pytest.MonkeyPatch
):
    """A GPU refuses such loads from elsewhere, which the interpreter does not see."""
    launches = Launches(topk_module._select_kernel)
    monkeypatch.setattr(topk_module, "_select_kernel", launches)
    made, memory = new_pass(at_sight([150] * 2), "cpu"), torch.zeros(1000)
    assert memory.data_ptr() % 16 == 0
    scores = memory.as_strided((2, 180), (stride, 1), begin)
    select_entries(scores, made.batch, 8, torch.zeros(2, 8, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    assert [one["ALIGNED"] for one in launches.given] == [aligned]


@pytest.mark.gpu
@pytest.mark.parametrize("topk", [512, 1024])
def test_a_million_tokens(topk: int, device: str):
    columns = 262144
    generator = torch.Generator().manual_seed(2)
    visible = [columns, columns - 1, topk, 600, 20000, *torch.randint(columns, (59,), generator=generator).tolist()]
    spans = [(4 * count, 4 * count + 1) for count in visible]
    made = new_pass(spans, device)
    scores = random_scores(64, columns)
    slots, lengths = choose(made, scores, topk)
    for row, count in enumerate(visible):
        kept = min(count, topk)
        order = scores[row, :count].to(device).sort(descending=True, stable=True).indices[:kept].cpu().sort().values
        assert int(lengths[row]) == kept
        assert torch.equal(slots[row, :kept].long(), made.plan.csa_entry_slots[row, order])
        assert bool((slots[row, kept:] == -1).all())


MAX_STACK_BYTES = 16
"""Bytes of the stack that a thread may take: registers are for the scores."""
SERVED = ((2048, 512), (CHUNK_SCORES, 1024), (262144, 512), (262144, 1024))
"""Columns and topk of models."""
ONE_KEY_A_THREAD = (4100, 100)
"""Rows that begin anywhere: of these ptxas lost a negation."""


def launches() -> None:
    made = new_pass([(0, 16)], "cpu")
    for columns, topk in (*SERVED, ONE_KEY_A_THREAD):
        slots, lengths = torch.zeros(16, topk, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
        candidates = new_candidates(16, columns, topk, "cpu")
        select_entries(torch.zeros(16, columns), made.batch, topk, slots, lengths, candidates=candidates)


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) == len(SERVED) + 1
    for usage in found[: len(SERVED)]:
        assert usage.registers <= MAX_REGISTERS and usage.stack <= MAX_STACK_BYTES and usage.local == 0, usage
        assert usage.shared <= 16, f"more than a semaphore's count moves between threads by Triton: {usage}"
