"""Sparse attention over paged keys: against the reference, against its own error bound, and at every edge of a list."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.plan import Batch, plan_batch
from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops.attention import sparse_attention as reference
from nvfp4_sgl.ops.rope import apply_rope, inverse_frequencies, rms_norm_rope
from nvfp4_sgl.triton_kernels.attention.sparse_attention import (
    Entries,
    Partials,
    new_partials,
    new_semaphores,
    sparse_attention,
)
from nvfp4_sgl.triton_kernels.attention.tiling import (
    BLACKWELL,
    HOPPER,
    SIXTEEN_HEADS,
    THIRTY_TWO_HEADS,
    Tiling,
    default_tiling,
)
from tests.triton.support.attention import (
    BOUND,
    CSA_PAGE,
    HCA_PAGE,
    SCALE,
    WINDOW_PAGE,
    Problem,
    check,
    cos_sin_of,
    named,
    pool,
    problem,
)


@pytest.mark.parametrize(
    "tiling",
    [HOPPER, BLACKWELL, SIXTEEN_HEADS, THIRTY_TWO_HEADS],
    ids=["heads x 512", "512 x heads", "few heads", "half"],
)
@pytest.mark.parametrize("heads", [8, 24, 40, 64, 128])
def test_heads(heads: int, tiling: Tiling, device: str) -> None:
    if device != "cpu" and tiling == BLACKWELL != default_tiling(64, packed=True):
        pytest.skip("another architecture's")
    check(problem(heads, [70, 20], tokens=1, seed=heads), device, tiling=tiling, splits=1)


@pytest.mark.parametrize(("packed", "splits"), [(True, 1), (True, 3), (False, 2)])
@pytest.mark.parametrize(
    ("widths", "extra_page", "index"),
    [([70], 1, torch.int64), ([70, 130], CSA_PAGE, torch.int32), ([40, 70], HCA_PAGE, torch.int64)],
)
def test_pools_and_splits(
    widths: list[int], extra_page: int, index: torch.dtype, packed: bool, splits: int, device: str
) -> None:
    case = problem(20, widths, tokens=1, packed=packed, extra_page=extra_page, seed=splits, index=index)
    check(case, device, splits=splits)


def test_the_reference_agrees(device: str) -> None:
    case = problem(8, [70, 30], tokens=3)
    lists = [slots.long() for slots in case.slots]
    whole = reference(case.q.float(), case.stores[0], lists[0], case.sink, SCALE, case.stores[1], lists[1])
    exact, size = case.exact()
    assert ((whole - exact).abs() <= 1e-4 * size).all()
    assert ((check(case, device) - whole).abs() <= 1.02 * BOUND * size).all()


def rotated_back(exact: Tensor, size: Tensor, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Both of :meth:`Problem.exact`, of outputs that are rotated back."""
    cos, sin = cos_sin_of(positions, frequencies).abs()[:, None].unflatten(-1, (32, 2)).unbind(-1)
    even, odd = size[..., 448:].unflatten(-1, (32, 2)).unbind(-1)
    tail = torch.stack((even * cos + odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    rotated = apply_rope(exact.float(), positions, frequencies, inverse=True)
    return rotated, torch.cat((size[..., :448], tail), dim=-1)


@pytest.mark.parametrize(
    ("tiling", "splits"),
    [
        *((tiling, 1) for tiling in (HOPPER, BLACKWELL, SIXTEEN_HEADS, THIRTY_TWO_HEADS)),
        *((SIXTEEN_HEADS, splits) for splits in (2, 9)),
        (THIRTY_TWO_HEADS, 3),
        (HOPPER, 2),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else named(value),
)
def test_the_output_is_rotated_back(tiling: Tiling, splits: int, device: str) -> None:
    """Whichever kernel rounds it, in every width of its blocks: the reference in fp32, rotated, is rounded once."""
    if device != "cpu" and tiling == BLACKWELL != default_tiling(64, packed=True):
        pytest.skip("another architecture's")
    case = problem(3, [70, 30], tokens=2, seed=splits)
    positions, frequencies = torch.tensor([70_001, 3]), inverse_frequencies(64, 10000.0)
    cos_sin = cos_sin_of(positions, frequencies)
    plain, rotated = (case.run(device, tiling=tiling, splits=splits, cos_sin=table) for table in (None, cos_sin))
    expected, size = rotated_back(*case.exact(), positions, frequencies)
    assert ((rotated - expected).abs() <= 1.01 * BOUND * size).all()
    assert torch.equal(rotated[..., :448], plain[..., :448])
    assert not torch.equal(rotated[..., 448:], plain[..., 448:])
    still = cos_sin_of(torch.zeros(2), frequencies)
    assert torch.equal(case.run(device, tiling=tiling, splits=splits, cos_sin=still), plain)


@pytest.mark.parametrize("splits", [1, 2])
def test_rotating_rounds_once(splits: int, device: str) -> None:
    """The output is a third of one key, so that it does not fit bf16: rounded before the turn, too, it would differ."""
    case = problem(8, [1], tokens=4, holes=0.0)
    case.q.zero_()
    case.sink.fill_(math.log(2))
    positions, frequencies = torch.tensor([1, 5, 999, 123_456]), inverse_frequencies(64, 160000.0)
    third = case.stores[0].read(case.slots[0].long()).expand(4, 8, 512) / 3
    expected = apply_rope(third, positions, frequencies, inverse=True).bfloat16()
    rotated = case.run(device, splits=splits, cos_sin=cos_sin_of(positions, frequencies))
    # The last bit of fp32 may decide a tie; a second rounding changes a tenth of all.
    assert (rotated != expected)[..., 448:].float().mean() < 2e-3


def divided(raw: Tensor, eps: float, positions: Tensor, frequencies: Tensor, *, rounded: bool = True) -> Tensor:
    """fp64: what raw queries count as, over their root mean square, the tail rotated and, if ``rounded``, rounded once.

    Where squares overflow fp32, 0.
    """
    rotated = apply_rope(raw if rounded else raw.float(), positions, frequencies).double()
    fits = raw.float().square().sum(-1, keepdim=True).isfinite()
    scale = (raw.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    return torch.where(fits, rotated * scale, 0.0)


@pytest.mark.parametrize(
    ("tiling", "splits"),
    [
        *((tiling, 1) for tiling in (HOPPER, BLACKWELL, SIXTEEN_HEADS, THIRTY_TWO_HEADS)),
        *((tiling, 3) for tiling in (SIXTEEN_HEADS, THIRTY_TWO_HEADS)),
        pytest.param(HOPPER, 3, marks=pytest.mark.gpu),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else named(value),
)
def test_raw_queries(tiling: Tiling, splits: int, device: str) -> None:
    """Nothing of them is rounded but the tail: what is left is the error of weights and output."""
    if device != "cpu" and tiling == BLACKWELL != default_tiling(64, packed=True):
        pytest.skip("another architecture's")
    case = problem(20, [40, 30], tokens=3)
    raw = torch.randint(-31, 32, case.q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    raw[1] *= 2**-11  # where what is added to the mean square counts
    raw[2] *= 2**40
    eps = 1e-6
    positions, frequencies = torch.tensor([70_001, 3, 1_048_575]), inverse_frequencies(64, 160000.0)
    cos_sin = cos_sin_of(positions, frequencies)
    case.q = raw
    found = case.run(device, tiling=tiling, splits=splits, cos_sin=cos_sin, query_eps=eps)
    case.q = divided(raw, eps, positions, frequencies)
    expected, size = rotated_back(*case.exact(), positions, frequencies)
    assert ((found - expected).abs() <= 1.01 * BOUND * size).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_raw_queries_of_any_size(seed: int, device: str) -> None:
    """Rows from 2^-40 to 2^50. All in all nearer to fp64 without a rounding than queries that are made ready before."""
    case = problem(20, [40, 30], tokens=2, seed=seed)
    raw = (case.q.float() * torch.exp2(torch.linspace(-40, 50, 20))[:, None]).bfloat16()
    raw[:, 7] = 0
    positions, frequencies = torch.tensor([12, 99_999]), inverse_frequencies(64, 10000.0)
    cos_sin = cos_sin_of(positions, frequencies)
    case.q = rms_norm_rope(raw, None, 1e-6, positions, frequencies)
    ready = case.run(device, cos_sin=cos_sin)
    case.q = raw
    found = case.run(device, cos_sin=cos_sin, query_eps=1e-6)
    case.q = divided(raw, 1e-6, positions, frequencies)
    expected, size = rotated_back(*case.exact(), positions, frequencies)
    assert ((found - expected).abs() <= 1.01 * BOUND * size).all()
    case.q = divided(raw, 1e-6, positions, frequencies, rounded=False)
    exact, size = rotated_back(*case.exact(), positions, frequencies)
    near, far = (((out - exact) / size.amax(-1, keepdim=True)).norm() for out in (found, ready))
    assert near <= far


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(
    ("tiling", "splits"),
    [
        (HOPPER, 1),
        (SIXTEEN_HEADS, 1),
        (THIRTY_TWO_HEADS, 1),
        (SIXTEEN_HEADS, 3),
        pytest.param(HOPPER, 3, marks=pytest.mark.gpu),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else named(value),
)
def test_raw_queries_whose_squares_overflow(tiling: Tiling, splits: int, device: str) -> None:
    """They count as 0; keys whose product with one overflows, too, do not count for it; no other head is touched."""
    case = problem(20, [40, 30], tokens=2)
    positions, frequencies = torch.tensor([12, 99_999]), inverse_frequencies(64, 10000.0)
    options = {"tiling": tiling, "splits": splits, "cos_sin": cos_sin_of(positions, frequencies), "query_eps": 1e-6}
    calm = case.run(device, **options)
    raw = case.q.clone()
    raw[0, 3] *= 2.0**70
    raw[1, 4] *= 2.0**90
    raw[0, 6] = raw[0, 6].sign() * 3e38
    raw[1, 7] = 3e38
    raw[0, 9, 5] = float("inf")
    raw[1, 10, 500] = float("nan")
    case.q = raw
    found = case.run(device, **options)
    touched = (raw != case.q.nan_to_num()).any(-1) | (raw.float().abs() > 2.0**60).any(-1)
    assert touched.sum() == 6 and found.isfinite().all()
    assert torch.equal(found[~touched], calm[~touched])
    case.q = divided(raw, 1e-6, positions, frequencies)
    expected, size = rotated_back(*case.exact(), positions, frequencies)
    for row in ((0, 3), (1, 4)):
        assert ((found - expected).abs() <= 1.01 * BOUND * size)[row].all()
    assert (found[1, 10] == 0).all()


@pytest.mark.parametrize("splits", [1, 3])
def test_a_query_that_sees_nothing_gives_zero(splits: int, device: str) -> None:
    case = problem(8, [20, 70], tokens=2)
    for slots in case.slots:
        slots[1] = -1
    assert (check(case, device, splits=splits)[1] == 0).all()
    lengths = torch.zeros(2, dtype=torch.int32)
    assert (case.run(device, window_lengths=lengths, extra_lengths=lengths, splits=splits) == 0).all()


@pytest.mark.parametrize("splits", [1, 4])
def test_a_single_entry(splits: int, device: str) -> None:
    """At the edges of a tile, in either list."""
    case = problem(8, [128, 65], tokens=5, holes=0.0)
    window, extra = case.slots
    for token, (slots, column) in enumerate([(window, 0), (window, 63), (window, 64), (extra, 0), (extra, 64)]):
        kept = int(slots[token, column])
        window[token], extra[token] = -1, -1
        slots[token, column] = kept
    check(case, device, splits=splits)


def test_columns_beyond_the_length_do_not_count(device: str) -> None:
    """Whatever they hold: slots of written entries, and of unwritten ones, which read as NaN."""
    case = problem(8, [129, 129], tokens=5, holes=0.0)
    lengths = [torch.tensor([1, 63, 65, 128, 129], dtype=torch.int32), torch.tensor([129, 128, 1, 64, 0])]
    for slots, (pages, page_size), ends in zip(case.slots, case.entries, lengths, strict=True):
        slots[:, -1] = torch.where(ends == 129, slots[:, -1], pages.shape[0] * page_size - 1)
    out = case.run(device, window_lengths=lengths[0], extra_lengths=lengths[1], splits=1)
    for slots, ends in zip(case.slots, lengths, strict=True):
        slots[torch.arange(129) >= ends[:, None]] = -1
    assert torch.equal(out, check(case, device, splits=1))


@pytest.mark.parametrize("width", [1, 127, 128, 129])
def test_window_edges(width: int, device: str) -> None:
    check(problem(16, [width], tokens=1, holes=0.0, seed=width), device)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_sink_far_from_the_logits(splits: int, device: str) -> None:
    case = problem(8, [70, 20], tokens=1)
    case.sink += torch.tensor([-1e30, -300, -20, 0, 20, 60, 300, 1e30])
    out = check(case, device, splits=splits)
    assert (out[:, 6:] == 0).all() and (out[:, :6] != 0).any(-1).all()


@pytest.mark.parametrize("splits", [1, 4])
def test_large_logits(splits: int, device: str) -> None:
    """One key takes all the weight, in whichever part it is."""
    case = problem(8, [70, 70], tokens=1)
    case.q *= 8
    check(case, device, splits=splits)


def planned(cached: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Window and HCA lists of a request's new tokens, by the plan of a batch; its pages lie in any order."""
    pages = torch.tensor([2, 0, 1])
    full_slots = (pages[:, None] * 256 + torch.arange(256)).flatten()[None]
    batch = Batch(
        starts=torch.tensor([cached]),
        ends=torch.tensor([cached + tokens]),
        requests=torch.tensor([0]),
        full_slots=full_slots,
        full_to_swa=torch.arange(768).flip(0),
    )
    plan = plan_batch(batch, window=128, ratios=frozenset({128}))
    return plan.swa_slots, plan.hca_slots


def test_chunked_and_cached_prefill_equal_one_shot(device: str) -> None:
    """Around the window's edge and the closing of the first and second ratio-128 entry."""
    torch.manual_seed(0)
    q, sink = torch.randn(260, 8, 512).bfloat16(), torch.randn(8)
    pools = [
        pool(torch.randn(n, 512), torch.arange(n), n, size, packed=True) for n, size in ((768, 256), (6, HCA_PAGE))
    ]
    entries, stores = (list(part) for part in zip(*pools, strict=True))
    some = torch.tensor([0, 1, 126, 127, 128, 254, 255, 256])
    lists = [slots[some].contiguous() for slots in planned(0, 260)]
    one_shot = check(Problem(q[some], sink, entries, stores, lists), device, splits=1)
    for cached, tokens in ((126, 3), (254, 3)):
        chunk = Problem(q[cached : cached + tokens], sink, entries, stores, list(planned(cached, tokens)))
        shared = (some >= cached) & (some < cached + tokens)
        assert torch.equal(chunk.run(device, splits=1), one_shot[shared])


@pytest.mark.parametrize("splits", [1, 2])
def test_a_chunk_has_the_bits_of_the_whole_prompt(splits: int, device: str) -> None:
    """Queries in another batch, with their entries in other pages: the same bits for the same splits."""
    case = problem(8, [70, 30], tokens=3)
    whole = case.run(device, splits=splits)
    entries = [Entries(torch.cat((e.pages[:1], e.pages)), e.page_size) for e in case.entries]
    lists = [torch.where(s < 0, s, s + e.page_size)[1:] for s, e in zip(case.slots, entries, strict=True)]
    chunk = Problem(case.q[1:], case.sink, entries, case.stores, lists)
    assert torch.equal(chunk.run(device, splits=splits), whole[1:])


def test_padding_of_lists_changes_nothing(device: str) -> None:
    case = problem(8, [70, 30], tokens=1)
    whole = case.run(device, splits=1)
    case.slots = [torch.nn.functional.pad(slots, (0, 100), value=-1) for slots in case.slots]
    assert torch.equal(case.run(device, splits=1), whole)


def test_strided_queries(device: str) -> None:
    case = problem(12, [64], tokens=2)
    whole = case.run(device)
    case.q = torch.nn.functional.pad(case.q, (0, 64, 0, 4))[:, :12, :512]
    assert torch.equal(case.run(device), whole)


def test_no_queries(device: str) -> None:
    case = problem(8, [64], tokens=1)
    empty = Problem(case.q[:0], case.sink, case.entries, case.stores, [case.slots[0][:0]])
    assert empty.run(device).shape == (0, 8, 512)


def test_what_the_kernel_does_not_take_is_refused(device: str) -> None:
    case = problem(8, [64, 64], tokens=2)
    entries, slots = case.entries, case.slots

    def run(**changes: object) -> None:
        arguments: dict[str, Any] = {
            "q": case.q,
            "window": entries[0],
            "window_slots": slots[0],
            "sink": case.sink,
            "scale": SCALE,
            "extra": entries[1],
            "extra_slots": slots[1],
            "out": torch.empty_like(case.q),
        } | changes
        sparse_attention(**arguments)

    wrong: list[dict[str, object]] = [
        {"q": case.q.float()},
        {"q": case.q[..., :256]},
        {"sink": case.sink[:4]},
        {"sink": case.sink.double()},
        {"window": Entries(entries[0].pages[:, :-576], WINDOW_PAGE)},
        {"window": Entries(entries[0].pages, 96)},
        {"extra": Entries(torch.zeros(2, CSA_PAGE * 512, dtype=torch.bfloat16), CSA_PAGE)},
        {"window_slots": slots[0].long()},
        {"window_slots": slots[0].float()},
        {"extra_slots": slots[1][:1]},
        {"window_lengths": torch.ones(3, dtype=torch.int32)},
        {"query_eps": 1e-6},
        {"query_eps": float("nan"), "cos_sin": torch.zeros(2, 64)},
        {"splits": 0},
        {"cos_sin": torch.zeros(2, 32)},
        {"cos_sin": torch.zeros(2, 64, dtype=torch.float64)},
        {"cos_sin": torch.zeros(2, 128)[:, ::2]},
        {"splits": 2, "partials": new_partials(case.q, 3)},
        {"splits": 2, "semaphores": new_semaphores(2, 7, "cpu")},
        {"splits": 2, "semaphores": new_semaphores(2, 8, "cpu").long()},
        {"splits": 1, "partials": Partials(torch.empty(0), torch.empty(0))},
        {"out": torch.empty(2, 8, 512)},
        {"out": torch.empty(2, 8, 1024, dtype=torch.bfloat16)[..., ::2]},
    ]
    for changes in wrong:
        with pytest.raises(OperandError):
            run(**changes)


@pytest.mark.parametrize(("packed", "splits"), [(True, 1), (True, 3), (False, 2)])
@pytest.mark.parametrize("tiling", [THIRTY_TWO_HEADS, SIXTEEN_HEADS], ids=named)
def test_pieces_of_64_columns(tiling: Tiling, packed: bool, splits: int, device: str) -> None:
    """Each at its place in queries, keys and output: with keys and queries of one piece's columns alone, too."""
    case = problem(32, [40, 70], tokens=1, packed=packed, seed=splits)
    check(case, device, tiling=tiling, splits=splits)
    whole = case.q.clone()
    for begin in range(0, 512, 64):
        case.q.zero_()
        case.q[..., begin : begin + 64] = whole[..., begin : begin + 64]
        check(case, device, tiling=tiling, splits=splits)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 32, 64, 128])
@pytest.mark.parametrize(("tokens", "extra"), [(1, 8192), (8, 1024), (64, 512), (300, 512)])
def test_serving_sizes(heads: int, tokens: int, extra: int, device: str) -> None:
    check(problem(heads, [128, extra], tokens=tokens, seed=tokens), device)


@pytest.mark.gpu
def test_a_pool_beyond_two_to_the_31_bytes(device: str) -> None:
    case = problem(64, [128, 512], tokens=4)
    window, extra = case.entries
    near = case.run(device, splits=1)
    pages = 2**32 // extra.pages.shape[1] + 1
    big = torch.full((pages + extra.pages.shape[0], extra.pages.shape[1]), 0xFF, dtype=torch.uint8, device=device)
    big[pages:] = extra.pages.to(device)
    slots = torch.where(case.slots[1] < 0, -1, case.slots[1] + pages * extra.page_size)
    far = Problem(case.q, case.sink, [window, Entries(big, extra.page_size)], case.stores, [case.slots[0], slots])
    assert torch.equal(far.run(device, splits=1), near)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", [HOPPER, SIXTEEN_HEADS, THIRTY_TWO_HEADS], ids=named)
def test_a_captured_launch_follows_its_inputs(tiling: Tiling, device: str) -> None:
    case = problem(64, [128, 512], tokens=4)
    q, sink = case.q.to(device), case.sink.to(device)
    window, extra = (Entries(e.pages.to(device), e.page_size) for e in case.entries)
    lists = [slots.to(device) for slots in case.slots]
    lengths = torch.full((4,), 512, dtype=torch.int32, device=device)
    out, partials, semaphores = torch.empty_like(q), new_partials(q, 4), new_semaphores(4, 64, device)

    def run() -> None:
        sparse_attention(
            q,
            window,
            lists[0],
            sink,
            SCALE,
            extra,
            lists[1],
            extra_lengths=lengths,
            splits=4,
            partials=partials,
            semaphores=semaphores,
            out=out,
            tiling=tiling,
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for length in (512, 3, 0, 77):
        lengths.fill_(length)
        graph.replay()
        replayed = out.clone()
        out.fill_(float("nan"))
        run()
        assert torch.equal(out, replayed)
