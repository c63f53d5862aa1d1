"""Programs for several neighbouring queries: against fp64, where lists agree and where they do not.

Of prompts, and of requests that have a few queries each, as in passes that verify a draft.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError, OperandValueError
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.ops.attention import sparse_attention as reference
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.attention import sparse_attention as attention
from nvfp4_sgl.triton_kernels.attention.tiling import (
    FOUR_QUERIES,
    HOPPER,
    MIN_TOGETHER,
    SIXTEEN_HEADS,
    THIRTY_TWO_HEADS,
    TWO_QUERIES,
    Tiling,
    choose_tiling,
)
from nvfp4_sgl.triton_kernels.common import chip
from tests.triton.support.attention import (
    BOUND,
    CSA_PAGE,
    SCALE,
    WINDOW_PAGE,
    Problem,
    check,
    cos_sin_of,
    pool,
    problem,
)
from tests.triton.test_attention import divided, rotated_back

WINDOW, ENTRIES, RATIO = 72, 80, 2
TILINGS = {32: TWO_QUERIES, 16: FOUR_QUERIES, 5: FOUR_QUERIES}
tilings = pytest.mark.parametrize(
    ("heads", "tiling"), TILINGS.items(), ids=lambda value: str(getattr(value, "queries", value))
)


def prompt(
    heads: int, chunks: list[tuple[int, int]], *, seed: int = 0
) -> tuple[Problem, list[Tensor], dict[str, Tensor]]:
    """Requests that each add positions ``begin`` to ``end``: windows newest first, and entries of two tokens each.

    Lists lie in rows of WINDOW and ENTRIES columns; what is beyond their lengths points at an entry of NaN. A few
    positions have no slot. Returns the problem, its lengths, and what goes with it to the op.
    """
    generator = torch.Generator().manual_seed(seed)
    pools, lists, lengths = [], [], []
    queries = [(request, p) for request, (begin, end) in enumerate(chunks) for p in range(begin, end)]
    longest = max(end for _, end in chunks)
    for columns, page_size, count in ((WINDOW, WINDOW_PAGE, longest), (ENTRIES, CSA_PAGE, longest // RATIO + 1)):
        total = len(chunks) * count
        places = torch.randperm(total + 9, generator=generator)
        table = places[:total].view(len(chunks), count)
        rows = torch.randn(total, 512, generator=generator)
        rows[:, ::29] *= 20  # outliers
        rows *= torch.exp2(torch.randint(-6, 3, (total, 8), generator=generator)).repeat_interleave(64, 1)
        pools.append(pool(rows, table.flatten(), total + 9, page_size, packed=True))
        table = torch.where(torch.rand(table.shape, generator=generator) < 0.05, -1, table)
        slots = torch.full((len(queries), columns), int(places[total]))
        ends = torch.zeros(len(queries), dtype=torch.int32)
        for row, (request, p) in enumerate(queries):
            own = table[request, max(0, p + 1 - columns) : p + 1].flip(0)
            if columns == ENTRIES:
                own = table[request, : min((p + 1) // RATIO, columns)]
            slots[row, : own.numel()], ends[row] = own, own.numel()
        lists.append(slots.int())
        lengths.append(ends)
    entries, stores = (list(part) for part in zip(*pools, strict=True))
    q = torch.randn(len(queries), heads, 512, generator=generator)
    q[:, ::3] *= 4  # some heads attend sharply,
    q[:, 1::3] = 0  # some to all alike
    case = Problem(q.bfloat16(), torch.randn(heads, generator=generator) * 2, entries, stores, lists)
    owners = torch.tensor([request for request, _ in queries], dtype=torch.int32)
    return case, lengths, {"window_lengths": lengths[0], "extra_lengths": lengths[1], "owners": owners}


def check_prompt(case: Problem, lengths: list[Tensor], given: dict[str, Tensor], device: str, **options: Any) -> Tensor:
    """Compare with fp64; returns the output."""
    out = case.run(device, **given, **options)
    exact, size = counted(case, lengths).exact()
    error = (out.double() - exact).abs()
    assert (error <= BOUND * size + 1e-37).all(), float((error / size.clamp(min=1e-30)).max())
    return out


def counted(case: Problem, lengths: list[Tensor]) -> Problem:
    """The problem with nothing in the columns that do not count."""
    slots = [
        torch.where(torch.arange(slots.shape[1]) < ends[:, None], slots, -1)
        for slots, ends in zip(case.slots, lengths, strict=True)
    ]
    return Problem(case.q, case.sink, case.entries, case.stores, slots)


CHUNKS = {
    "from the beginning": [(0, 11)],
    "where windows fill": [(66, 79)],
    "where entries are as many as there may be": [(152, 165)],
    "several requests": [(0, 3), (70, 75), (158, 159), (10, 16)],
}


@tilings
@pytest.mark.parametrize("chunks", CHUNKS)
def test_prompts(chunks: str, heads: int, tiling: Tiling, device: str) -> None:
    check_prompt(*prompt(heads, CHUNKS[chunks]), device, tiling=tiling)


@tilings
def test_lists_that_have_nothing_in_common(heads: int, tiling: Tiling, device: str) -> None:
    """Each query is another request's."""
    check(problem(heads, [70, 30], tokens=5, seed=heads), device, tiling=tiling, owners=torch.tensor([0, 1, 2, 3, 4]))
    check(problem(heads, [129], tokens=2, holes=0.0), device, tiling=tiling, owners=torch.tensor([7, 2]))


@tilings
def test_raw_queries_are_rotated_by_their_own_positions(heads: int, tiling: Tiling, device: str) -> None:
    case, lengths, options = prompt(heads, [(66, 71), (0, 2)])
    positions, frequencies = torch.tensor([66, 67, 68, 69, 70, 0, 1]), inverse_frequencies(64, 160000.0)
    raw = torch.randint(-31, 32, case.q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    raw[1] *= 2**-11  # where what is added to the mean square counts
    raw[2] *= 2**40
    case.q = raw
    options["cos_sin"] = cos_sin_of(positions, frequencies)
    found = case.run(device, tiling=tiling, query_eps=1e-6, **options)
    case.q = divided(raw, 1e-6, positions, frequencies)
    case.slots = [
        torch.where(torch.arange(slots.shape[1]) < ends[:, None], slots, -1)
        for slots, ends in zip(case.slots, lengths, strict=True)
    ]
    expected, size = rotated_back(*case.exact(), positions, frequencies)
    assert ((found - expected).abs() <= 1.01 * BOUND * size).all()


@tilings
def test_an_entry_of_another_request_touches_nothing(heads: int, tiling: Tiling, device: str) -> None:
    """NaN in what one request sees, in a program with queries of another."""
    case, lengths, options = prompt(heads, [(3, 6), (8, 13)])
    calm = case.run(device, tiling=tiling, **options)
    window = case.entries[0]
    slot = int(case.slots[0][0, : lengths[0][0]].max())
    window.pages[slot // WINDOW_PAGE, slot % WINDOW_PAGE * 576 :][:576] = 0xFF
    found = case.run(device, tiling=tiling, **options)
    assert found[0].isnan().any() and torch.equal(found[3:], calm[3:])


@tilings
def test_what_lies_behind_the_last_query_touches_nothing(heads: int, tiling: Tiling, device: str) -> None:
    """A program's last queries may not exist. Behind the others lies what would be their owner, and entries of NaN."""
    case, lengths, options = prompt(heads, [(8, 13), (3, 6)])
    kept, nan = 5, [int(slots[0, -1]) for slots in case.slots]
    case.q, case.slots = case.q[:kept], [slots[:kept] for slots in case.slots]
    ends = [part[:kept] for part in lengths]
    for slots, slot, part in zip(case.slots, nan, ends, strict=True):
        behind = slots.as_strided((3, slots.shape[1]), slots.stride(), slots.numel())
        behind.fill_(slot)
        part.as_strided((3,), (1,), kept).fill_(slots.shape[1])
    options["owners"].fill_(0)
    options |= {name: values[:kept] for name, values in options.items()}
    check_prompt(case, ends, options, device, tiling=tiling)


@tilings
def test_no_length_counts_beyond_the_columns(heads: int, tiling: Tiling, device: str) -> None:
    """Behind a row of entries lie the next query's; behind the last query's, entries of NaN."""
    first = CHUNKS["where entries are as many as there may be"]
    kept = first[0][1] - first[0][0]
    case, lengths, options = prompt(heads, [*first, (0, 3)])
    case.slots[1][kept:] = int(case.slots[1][kept, -1])
    case.q, case.slots = case.q[:kept], [slots[:kept] for slots in case.slots]
    ends = [part[:kept] for part in lengths]
    options = {name: values[:kept] for name, values in options.items()}
    assert int((ends[1] == ENTRIES).sum()) > 1
    options["extra_lengths"] = torch.where(ends[1] == ENTRIES, ENTRIES + 3, ends[1])
    check_prompt(case, ends, options, device, tiling=tiling)


def test_slots_that_are_missing_count_for_nobody(device: str) -> None:
    case, _, options = prompt(16, [(5, 10)])
    for slots in case.slots:
        slots[:] = -1
    assert (case.run(device, tiling=FOUR_QUERIES, **options) == 0).all()


def test_without_lengths_all_columns_count(device: str) -> None:
    case = problem(16, [70, 30], tokens=6, holes=0.0)
    for query in (1, 2, 3, 5):
        case.slots[0][query, 1:] = case.slots[0][query - 1, :-1].clone()
        case.slots[1][query] = case.slots[1][query - 1]
    check(case, device, tiling=FOUR_QUERIES, owners=torch.tensor([3, 3, 3, 3, 0, 0]))


# --- requests that have a few queries each ----------------------------------------------------------------------

BEGINS = {
    "at the beginning": (0,),
    "where windows fill": (69, 0),
    "where entries are as many as there may be": (156, 3, 70),
}
"""Positions of the first queries of requests: 1 to 3 requests."""


def drafted(heads: int, begins: tuple[int, ...], each: int) -> tuple[Problem, list[Tensor], dict[str, Any]]:
    case, lengths, given = prompt(heads, [(begin, begin + each) for begin in begins], seed=each)
    return case, lengths, {**given, "tokens_each": each}


@tilings
@pytest.mark.parametrize("each", [2, 3, 4, 6])
@pytest.mark.parametrize("begins", BEGINS)
def test_each_request_has_so_many_queries(begins: str, each: int, heads: int, tiling: Tiling, device: str) -> None:
    """Against fp64, and against the reference."""
    case, lengths, given = drafted(heads, BEGINS[begins], each)
    out = check_prompt(case, lengths, given, device, tiling=tiling)
    known = counted(case, lengths)
    window, extra = (slots.long() for slots in known.slots)
    whole = reference(case.q.float(), case.stores[0], window, case.sink, SCALE, case.stores[1], extra)
    assert ((out - whole).abs() <= 1.02 * BOUND * known.exact()[1] + 1e-37).all()


@pytest.mark.parametrize(
    ("heads", "each", "grid", "block"),
    [(16, 6, (2, 3), 3), (16, 4, (1, 3), 4), (16, 3, (1, 3), 3), (32, 6, (3, 3), 2), (32, 3, (2, 3), 2)],
)
def test_no_block_has_queries_of_two_requests(
    heads: int, each: int, grid: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of a request, and requests; the more even, the sooner the last is done."""
    found: list[tuple[tuple[int, ...], int, int]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, EACH, BLOCK, **more: found.append((grid, EACH, BLOCK))

    monkeypatch.setattr(attention, "attend_block", Launched())
    case, _, given = drafted(heads, BEGINS["where entries are as many as there may be"], each)
    case.launch("cpu", out=torch.empty_like(case.q), tiling=TILINGS[heads], **given)
    assert found == [(grid, each, block)]


@tilings
def test_blocks_across_requests_would_be_wrong(heads: int, tiling: Tiling, device: str) -> None:
    """On these inputs, if a request's last query shared its list with the next one's first: their windows are full."""
    case, lengths, given = drafted(heads, (100, 90, 110), 5)
    check_prompt(case, lengths, given, device, tiling=tiling)
    given["tokens_each"] = 15
    with pytest.raises(AssertionError):
        check_prompt(case, lengths, given, device, tiling=tiling)


@tilings
@pytest.mark.parametrize("each", [2, 3, 4, 6])
def test_queries_of_padding_are_all_at_position_0(each: int, heads: int, tiling: Tiling, device: str) -> None:
    """They see what is at slot 0 of the window. In front of their lists lie slots that read as NaN."""
    case, lengths, given = drafted(heads, (0, 12, 0), each)
    nan = [int(slots[0, -1]) for slots in case.slots]
    for begin in (0, 2 * each):
        for slots, ends, slot in zip(case.slots, lengths, nan, strict=True):
            slots[begin : begin + each] = torch.cat((slots[begin, :1], slots.new_full((slots.shape[1] - 1,), slot)))
            ends[begin : begin + each] = ends[begin]
    assert lengths[0].tolist() == [1] * each + [*range(13, 13 + each)] + [1] * each
    case.slots = [
        torch.cat((slots.new_full((each, slots.shape[1]), slot), slots))[each:]
        for slots, slot in zip(case.slots, nan, strict=True)
    ]
    check_prompt(case, lengths, given, device, tiling=tiling)


@tilings
def test_nothing_of_another_request_touches_a_request(heads: int, tiling: Tiling, device: str) -> None:
    case, lengths, given = drafted(heads, (3, 8), 6)
    calm = case.run(device, tiling=tiling, **given)
    slot = int(case.slots[0][0, : lengths[0][0]].max())
    case.entries[0].pages[slot // WINDOW_PAGE, slot % WINDOW_PAGE * 576 :][:576] = 0xFF
    found = case.run(device, tiling=tiling, **given)
    assert found[0].isnan().any() and torch.equal(found[6:], calm[6:])


@tilings
def test_a_request_gives_the_same_bits_in_any_company(heads: int, tiling: Tiling, device: str) -> None:
    """Its blocks are cut alike wherever it stands; so a graph that is padded gives an eager pass's bits."""
    case, _, given = drafted(heads, (8, 3, 70), 6)
    whole = case.run(device, tiling=tiling, **given)
    for request in range(3):
        rows = slice(6 * request, 6 * request + 6)
        alone = Problem(case.q[rows], case.sink, case.entries, case.stores, [slots[rows] for slots in case.slots])
        own = {name: value[rows] if isinstance(value, Tensor) else value for name, value in given.items()}
        assert torch.equal(alone.run(device, tiling=tiling, **own), whole[rows])


@pytest.mark.parametrize(
    ("heads", "queries", "options", "expected"),
    [
        (32, MIN_TOGETHER, {}, TWO_QUERIES),
        (16, MIN_TOGETHER, {}, FOUR_QUERIES),
        (33, MIN_TOGETHER, {}, HOPPER),
        (32, MIN_TOGETHER - 1, {}, THIRTY_TWO_HEADS),
        (32, MIN_TOGETHER, {"columns": (128, 0)}, THIRTY_TWO_HEADS),
        (32, MIN_TOGETHER, {"columns": (128, 16)}, TWO_QUERIES),
        (16, MIN_TOGETHER, {"columns": (128, 0)}, FOUR_QUERIES),
        (16, MIN_TOGETHER, {"columns": (3, 512)}, TWO_QUERIES),
        (16, MIN_TOGETHER, {"columns": (1, 512)}, SIXTEEN_HEADS),
        (32, MIN_TOGETHER, {"together": False}, THIRTY_TWO_HEADS),
        (16, MIN_TOGETHER, {"packed": False}, SIXTEEN_HEADS),
        (16, 384, {"each": 6}, FOUR_QUERIES),
        (16, 384, {"each": 3}, FOUR_QUERIES),
        (16, 384, {"each": 2}, TWO_QUERIES),
        (16, 384, {"each": 2, "columns": (128, 0)}, SIXTEEN_HEADS),
        (32, 384, {"each": 6}, TWO_QUERIES),
        (32, 384, {"each": 3}, TWO_QUERIES),
        (32, 96, {"each": 6}, THIRTY_TWO_HEADS),
    ],
)
def test_who_shares_a_program(heads: int, queries: int, options: dict[str, Any], expected: Tiling) -> None:
    if not chip.is_before_blackwell():
        pytest.skip("Blackwell gives each query its own program, and has no tiling to choose here")
    given: dict[str, Any] = {"columns": (128, 512), "packed": True, "together": True, **options}
    assert choose_tiling(queries, heads, given.pop("columns"), 132, **given) == expected


def test_what_does_not_suit_is_refused(device: str) -> None:
    case, owners = problem(32, [70, 30], tokens=4), torch.zeros(4, dtype=torch.int32)
    wrong: list[dict[str, Any]] = [
        {"tiling": FOUR_QUERIES, "owners": owners},
        {"tiling": TWO_QUERIES, "owners": owners, "splits": 2},
        {"tiling": TWO_QUERIES},
    ]
    for options in wrong:
        with pytest.raises(OperandValueError, match="queries of a program"):
            case.run(device, **options)
    rows = Rows.allocate(4, 4096, 8, device, groups=4)
    with pytest.raises(OperandValueError, match="queries of a program"):
        case.launch(device, tiling=TWO_QUERIES, owners=owners, out_rows=rows)
    with pytest.raises(OperandValueError, match="a window of 3"):
        problem(8, [3], tokens=4).run(device, tiling=FOUR_QUERIES, owners=owners)
    for each in (0, 3):
        with pytest.raises(
            OperandValueError, match=f"tokens_each: expected a divisor of the 4 queries of q, .* {each}"
        ):
            case.run(device, tiling=TWO_QUERIES, owners=owners, tokens_each=each)
    for bad in (owners[:3], owners.float()):
        with pytest.raises(OperandError, match="owners"):
            case.run(device, owners=bad)


def test_a_few_queries_have_programs_of_their_own(device: str) -> None:
    case = problem(20, [40, 30], tokens=2)
    assert torch.equal(check(case, device, owners=torch.zeros(2, dtype=torch.int32)), case.run(device))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32])
@pytest.mark.parametrize("begin", [0, 1000])
def test_serving_sizes(heads: int, begin: int, device: str) -> None:
    check_prompt(*prompt(heads, [(begin, begin + 300), (0, 40)]), device)
