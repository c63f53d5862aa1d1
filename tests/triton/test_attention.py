"""Sparse attention over paged keys: against the reference, against its own error bound, and at every edge of a list."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.plan import Batch, plan_batch
from nvfp4_sgl.cache.rows import ExactRows, PackedKvRows, RowStore
from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import kv_entry
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
    HOPPER_TWO_TILES,
    SIXTEEN_HEADS,
    Tiling,
    choose_splits,
    choose_tiling,
    default_tiling,
    most_splits,
)
from tests.triton.support.interpreter import run_backwards

SCALE = 512**-0.5
BOUND = 2**-7 * (1 + 2**-5)
"""Of the error over Σ w_j |k_j|: weights and output are rounded to bf16 once each, 2^-8; the rest is fp32."""
WINDOW_PAGE, CSA_PAGE, HCA_PAGE = 256, 64, 2


def named(tiling: Tiling) -> str:
    """What tells the tilings here apart."""
    layout = "transposed" if tiling.transposed else "heads first"
    return f"{tiling.heads} heads, {tiling.keys} keys, {layout}"


def pool(rows: Tensor, slots: Tensor, count: int, page_size: int, *, packed: bool) -> tuple[Entries, RowStore]:
    """A pool of ``count`` entries with ``rows`` at ``slots``; every other byte is 0xFF, which reads as NaN."""
    pages = -(-count // page_size)
    store: RowStore
    if packed:
        buffer = torch.full((pages, kv_entry.page_bytes(page_size)), 0xFF, dtype=torch.uint8)
        store = PackedKvRows(buffer, page_size)
    else:
        buffer = torch.full((pages, page_size * 512), float("nan"), dtype=torch.bfloat16)
        store = ExactRows(buffer, 512)
    store.write(slots, rows)
    return Entries(buffer, page_size), store


@dataclass
class Problem:
    """Arguments on the CPU, of the op (``entries``) and of the reference (``stores``)."""

    q: Tensor
    sink: Tensor
    entries: list[Entries]
    stores: list[RowStore]
    slots: list[Tensor]

    def run(self, device: str, **options: Any) -> Tensor:
        """The op's bf16 output, poisoned first."""
        out = torch.full_like(self.q, float("nan"), device=device)
        self.launch(device, out=out, **options)
        return out.cpu()

    def launch(self, device: str, **options: Any) -> None:
        window, *extra = [Entries(pages.to(device), size) for pages, size in self.entries]
        window_slots, *extra_slots = [slots.to(device) for slots in self.slots]
        q = self.q.to(device)
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
        pair = (extra[0], extra_slots[0]) if extra else (None, None)
        sparse_attention(q, window, window_slots, self.sink.to(device), SCALE, *pair, **options)

    def exact(self) -> tuple[Tensor, Tensor]:
        """fp64: the result, and Σ w_j |k_j|, by which its error is measured."""
        out = torch.empty(self.q.shape, dtype=torch.float64)
        size = torch.empty_like(out)
        for token in range(self.q.shape[0]):
            keys = torch.cat(
                [torch.zeros(0, 512, dtype=torch.float64)]
                + [
                    store.read(slots[token][slots[token] >= 0]).double()
                    for store, slots in zip(self.stores, self.slots, strict=True)
                    if (slots[token] >= 0).any()
                ]
            )
            logits = torch.cat((self.q[token].double() @ keys.T * SCALE, self.sink.double()[:, None]), dim=1)
            weights = logits.softmax(-1)[:, :-1]
            out[token], size[token] = weights @ keys, weights @ keys.abs()
        return out, size


def problem(
    heads: int,
    widths: list[int],
    *,
    tokens: int = 3,
    packed: bool = True,
    extra_page: int = CSA_PAGE,
    holes: float = 0.1,
    seed: int = 0,
    index: torch.dtype = torch.int32,
) -> Problem:
    """Random lists of entries that lie anywhere, some shared between queries, some missing."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, heads, 512, generator=generator)
    q[:, ::3] *= 4  # some heads attend sharply
    entries, stores, lists = [], [], []
    for width, page_size in zip(widths, (WINDOW_PAGE, extra_page), strict=False):
        count = 2 * width + 5
        used = torch.randperm(count, generator=generator)[: max(width + width // 2, 1)]
        rows = torch.randn(used.numel(), 512, generator=generator)
        rows[:, ::29] *= 20  # outliers
        rows *= torch.exp2(torch.randint(-6, 3, (used.numel(), 8), generator=generator)).repeat_interleave(64, 1)
        part, store = pool(rows, used, count, page_size, packed=packed)
        choice = torch.stack([used[torch.randperm(used.numel(), generator=generator)[:width]] for _ in range(tokens)])
        missing = torch.rand(choice.shape, generator=generator) < holes
        entries.append(part)
        stores.append(store)
        lists.append(torch.where(missing, -1, choice).to(index))
    sink = torch.randn(heads, generator=generator) * 2
    return Problem(q.bfloat16(), sink, entries, stores, lists)


def check(case: Problem, device: str, **options: object) -> Tensor:
    out = case.run(device, **options)
    exact, size = case.exact()
    error = (out.double() - exact).abs()
    assert (error <= BOUND * size + 1e-37).all(), float((error / size.clamp(min=1e-30)).max())
    return out


@pytest.mark.parametrize(
    "tiling",
    [HOPPER, BLACKWELL, SIXTEEN_HEADS],
    ids=["heads x 512", "512 x heads", "few heads"],
)
@pytest.mark.parametrize("heads", [8, 24, 64, 128])
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


def cos_sin_of(positions: Tensor, frequencies: Tensor) -> Tensor:
    """(cos, sin) by pair, fp32 [T, 64]."""
    angles = positions.float()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)


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
        *((tiling, 1) for tiling in (HOPPER, BLACKWELL, SIXTEEN_HEADS)),
        *((SIXTEEN_HEADS, splits) for splits in (2, 9)),
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
        *((tiling, 1) for tiling in (HOPPER, BLACKWELL, SIXTEEN_HEADS)),
        (SIXTEEN_HEADS, 3),
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
    [(HOPPER, 1), (SIXTEEN_HEADS, 1), (SIXTEEN_HEADS, 3), pytest.param(HOPPER, 3, marks=pytest.mark.gpu)],
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
    [(SIXTEEN_HEADS, 8, 33, (3, 6, 20, 40)), (HOPPER, 20, 9, (3, 9))],
    ids=["few heads", "many heads"],
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


def test_no_queries(device: str) -> None:
    case = problem(8, [64], tokens=1)
    empty = Problem(case.q[:0], case.sink, case.entries, case.stores, [case.slots[0][:0]])
    assert empty.run(device).shape == (0, 8, 512)


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


@pytest.mark.parametrize("tiling", [HOPPER, SIXTEEN_HEADS], ids=named)
@pytest.mark.parametrize("queries", [1, 3, 8, 33, 64, 100, 8192])
def test_programs_of_split_keys_all_have_a_place(queries: int, tiling: Tiling) -> None:
    """They wait for one another."""
    for heads in (8, 24, 64, 128):
        splits = choose_splits(queries, heads, (128, 8192), 132, tiling)
        programs = queries * -(-heads // tiling.heads) * splits
        assert splits == 1 or programs <= 132 * tiling.resident
        assert splits <= most_splits(queries, heads, 132, tiling)
    assert most_splits(2, 64, 132, HOPPER) == 66
    assert most_splits(2, 65, 132, SIXTEEN_HEADS) == 26


def test_the_measured_tilings() -> None:
    """What was fastest on an H200."""
    for queries, heads, columns, expected, splits in [
        (1, 64, (128,), SIXTEEN_HEADS, 4),
        (1, 64, (128, 512), SIXTEEN_HEADS, 20),
        (1, 64, (128, 1024), SIXTEEN_HEADS, 36),
        (1, 64, (128, 8192), SIXTEEN_HEADS, 65),
        (2, 64, (128, 8192), HOPPER, 65),
        (4, 64, (128, 512), SIXTEEN_HEADS, 16),
        (8, 64, (128,), SIXTEEN_HEADS, 4),
        (8, 64, (128, 512), HOPPER, 10),
        (8, 64, (128, 8192), HOPPER, 16),
        (16, 64, (128,), SIXTEEN_HEADS, 4),
        (16, 64, (128, 512), HOPPER, 8),
        (32, 64, (128,), SIXTEEN_HEADS, 1),
        (64, 64, (128,), HOPPER_TWO_TILES, 1),
        (64, 64, (128, 512), HOPPER, 2),
        (256, 64, (128,), HOPPER, 1),
        (256, 64, (128, 512), HOPPER, 1),
        (8192, 64, (128, 512), HOPPER, 1),
        (1, 128, (128,), SIXTEEN_HEADS, 4),
        (1, 128, (128, 1024), SIXTEEN_HEADS, 18),
        (8, 128, (128,), SIXTEEN_HEADS, 4),
        (8, 128, (128, 1024), HOPPER, 8),
        (64, 128, (128,), HOPPER_TWO_TILES, 1),
        (8192, 8, (128, 512), SIXTEEN_HEADS, 1),
    ]:
        tiling = choose_tiling(queries, heads, columns, 132, packed=True)
        if default_tiling(64, packed=True) != HOPPER and expected != SIXTEEN_HEADS:
            continue
        assert tiling == expected, (queries, heads, columns)
        assert choose_splits(queries, heads, columns, 132, tiling) == splits, (queries, heads, columns)


@pytest.mark.parametrize("heads", [8, 64, 128])
def test_a_step_and_the_graph_that_pads_it_split_alike(heads: int) -> None:
    """SGLang captures the powers of two and sizes between them; a step runs in the least graph that holds it."""
    captured = [1, 2, 4, 8, 12, 16, 24, 32, *range(40, 257, 8)]
    for queries in range(1, 257):
        graph = min(size for size in captured if size >= queries)
        for columns in ((128,), (128, 512), (128, 8192)):
            alone, padded = (
                (
                    tiling := choose_tiling(count, heads, columns, 132, packed=True),
                    choose_splits(count, heads, columns, 132, tiling),
                )
                for count in (queries, graph)
            )
            assert alone == padded


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


@pytest.mark.gpu
def test_more_programs_than_have_a_place_are_refused(device: str) -> None:
    """Waiting for one that has no place, they would never end."""
    case = problem(64, [64, 64], tokens=2)
    most = most_splits(2, 64, torch.cuda.get_device_properties(device).multi_processor_count, HOPPER)
    check(case, device, tiling=HOPPER, splits=most)
    with pytest.raises(OperandError, match=rf"splits: .*{most}\], found {most + 1}"):
        case.run(device, tiling=HOPPER, splits=most + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 64, 128])
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
@pytest.mark.parametrize("tiling", [HOPPER, SIXTEEN_HEADS], ids=named)
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
