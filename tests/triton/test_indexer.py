"""Index queries equal the reference's bits, whoever prepares them; scores are its scores of what a token sees, and
nothing else is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.rows import PackedRows
from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import index_entry
from nvfp4_sgl.ops.indexer import index_scores as reference_scores
from nvfp4_sgl.ops.indexer import indexer_query
from nvfp4_sgl.ops.rope import apply_rope, inverse_frequencies
from nvfp4_sgl.triton_kernels.common.rope import rope_cos_sin
from nvfp4_sgl.triton_kernels.indexer import scores as indexer_scores
from nvfp4_sgl.triton_kernels.indexer.query import prepare_queries
from nvfp4_sgl.triton_kernels.indexer.scores import (
    DECODE,
    HOPPER_PREFILL,
    PREFILL,
    Tiling,
    choose_splits,
    index_scores,
)
from tests.support.interpreted import ON_GPU
from tests.triton.support.passes import Pass, new_pass
from tests.triton.support.resources import resources

PAGE = 64
FREQUENCIES = inverse_frequencies(64, 160000.0)


def adversarial_queries(heads: int) -> Tensor:
    """bf16 [7, heads, 128]: wide ranges, zeros, ties, what is not finite."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, heads, 128, generator=generator)
    q[1] *= torch.exp2(torch.randint(-30, 30, (heads, 128), generator=generator).float())
    q[2, 0], q[2, 1] = 0.0, -0.0
    q[2, 2] = 1e-7
    q[3, :, 64:] = 0.0
    q[3, :, :64] = torch.randint(-4, 5, (heads, 64), generator=generator).float()
    q[4, 0, ::7], q[4, 1, 5], q[4, 2, 100] = torch.nan, torch.inf, -torch.inf
    q[5, 0] = 3e38
    return q.to(torch.bfloat16)


def queried(
    q: Tensor, weights: Tensor, positions: Tensor, factor: float, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    tokens, heads = q.shape[:2]
    cos_sin = rope_cos_sin(positions.to(device), FREQUENCIES.to(device), torch.empty(tokens, 64, device=device))
    queries = torch.full((tokens, heads, 128), 0x7B, dtype=torch.uint8, device=device).to(dtype)
    scaled = torch.full((tokens, heads), torch.nan, device=device)
    prepare_queries(q, weights, cos_sin, factor, queries, scaled)
    return queries.cpu(), scaled.cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [64, 16, 3])
def test_queries_equal_the_reference(heads: int, dtype: torch.dtype, device: str):
    generator = torch.Generator().manual_seed(1)
    raw = adversarial_queries(heads).to(dtype)
    if dtype == torch.float32:
        raw += torch.randn(raw.shape, generator=generator) * 1e-3  # rounded to bf16 first
    positions = torch.tensor([0, 1, 127, 65535, 300001, 1048574, 9])
    factor = 128**-0.5 * heads**-0.5
    wide = torch.randn(7, heads * 2, generator=generator).to(dtype)
    given = torch.cat([raw, raw.new_full((7, 1, 128), torch.nan)], dim=1).to(device)[:, :heads]
    codes, scaled = queried(given, wide.to(device)[:, heads:], positions, factor, torch.float8_e4m3fn, device)

    rotated = apply_rope(raw.to(torch.bfloat16), positions, FREQUENCIES)
    data, scale = index_entry.pack(index_entry.hadamard(rotated.float()).view(-1, 128))
    assert torch.equal(codes.view(torch.uint8), data.view(7, heads, 128))
    assert torch.equal(scaled, wide[:, heads:].float() * torch.tensor(factor).float() * scale.view(7, heads))


def test_exact_queries_are_rotated_only(device: str):
    raw, positions = adversarial_queries(4)[:4], torch.tensor([0, 7, 300001, 5])
    weights = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    codes, scaled = queried(raw.to(device), weights.to(device), positions, 0.25, torch.bfloat16, device)
    assert torch.equal(codes.view(torch.int16), apply_rope(raw, positions, FREQUENCIES).view(torch.int16))
    assert torch.equal(scaled, weights * 0.25)


class Layer:
    """Raw queries and cached keys of a pass: packed, or exact."""

    def __init__(self, made: Pass, heads: int, *, exact: bool = False, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        tokens, self.made = made.batch.tokens, made
        self.raw = torch.randn(tokens, heads, 128, generator=generator).to(torch.bfloat16)
        self.raw_weights = torch.randn(tokens, heads, generator=generator)  # of both signs
        self.factor = 128**-0.5 * heads**-0.5
        keys = torch.randn(made.pages * PAGE, 128, generator=generator).to(torch.bfloat16)
        rotated = apply_rope(self.raw, made.plan.positions, FREQUENCIES)
        self.weights = self.raw_weights * self.factor
        if exact:
            self.pages, self.q, self.keys = keys.view(made.pages, -1), rotated.float(), keys.float()
            return
        self.pages = torch.full((made.pages, index_entry.page_bytes(PAGE)), 0xFF, dtype=torch.uint8)
        slots = made.plan.csa_entry_slots.flatten()
        slots = slots[slots >= 0]  # all else reads as NaN
        index_entry.write_rows(self.pages, PAGE, slots, keys[slots])
        store = PackedRows(index_entry.FORMAT, self.pages, PAGE)
        self.keys = store.read(torch.arange(made.pages * PAGE))
        self.q = indexer_query(rotated, store)

    def expected(self, token: int) -> tuple[Tensor, Tensor]:
        """The reference's scores of what a token sees, and the sum of magnitudes that errors are measured by."""
        owner, visible = int(self.made.batch.owners[token]), int(self.made.plan.csa_visible[token])
        keys = self.keys[self.made.plan.csa_entry_slots[owner, :visible]]
        q, weights = self.q[token], self.weights[token]
        scores = reference_scores(q[None, None], weights[None, None], keys[None])[0, 0]
        return scores, ((keys.abs() @ q.abs().T) * weights.abs()).sum(1)

    def scores(
        self, columns: int, topk: int, device: str, *, first: int = 0, rows: int | None = None, tiling: Tiling | None
    ) -> Tensor:
        rows = self.made.batch.tokens if rows is None else rows
        part = slice(first, first + rows)
        scores = torch.full((rows, columns + 16), torch.nan, device=device)[:, :columns]
        index_scores(
            *self.queries(device, part),
            self.pages.to(device),
            PAGE,
            self.made.batch,
            topk,
            scores,
            first=first,
            tiling=tiling,
        )
        return scores.cpu()

    def queries(self, device: str, part: slice) -> tuple[Tensor, Tensor, Tensor, float]:
        """What ``index_scores`` is told of them."""
        positions = self.made.batch.positions[part]
        cos_sin = rope_cos_sin(positions, FREQUENCIES.to(device), torch.empty(len(positions), 64, device=device))
        return self.raw[part].to(device), self.raw_weights[part].to(device), cos_sin, self.factor

    def check(self, found: Tensor, topk: int, *, first: int = 0) -> None:
        columns = found.shape[1]
        for row in range(len(found)):
            expected, magnitude = self.expected(first + row)
            if len(expected) <= topk:
                expected = expected[:0]
            visible = min(len(expected), columns)
            error = (found[row, :visible] - expected[:visible]).abs()
            assert bool((error <= tolerance() * magnitude[:visible]).all()), f"row {row}: {error.max()}"
            assert bool(found[row, visible:].isnan().all()), f"row {row} is written beyond what its token sees"


def tolerance() -> float:
    """Tolerance over the sum of magnitudes: fp32 under the interpreter and on Blackwell, 14 bits a step on Hopper."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return 2.0**-9 if hopper else 2.0**-20


TILINGS = {"decode": DECODE, "prefill": PREFILL, "hopper": HOPPER_PREFILL}
SINGLE = replace(DECODE, pages=1, warps=4)
"""A page a step; other neighbours in a thread."""


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("heads", [64, 5])
def test_decoding(heads: int, tiling: str, device: str):
    """Visible counts around topk and around a page."""
    counts = [0, 3, 4, 5, 63, 64, 65, 130]
    made = new_pass([(4 * n, 4 * n + 1) for n in counts], device)
    layer = Layer(made, heads)
    layer.check(layer.scores(192, 4, device, tiling=TILINGS[tiling]), 4)


@pytest.mark.parametrize("tiling", TILINGS)
def test_prompts_in_parts(tiling: str, device: str):
    """Ragged requests, several queries each, scored in parts whose tiles straddle requests."""
    made = new_pass([(300, 309), (0, 7), (30, 31), (255, 266), (513, 514)], device)
    layer = Layer(made, 16)
    for begin, end in ((0, 6), (6, 7), (7, made.batch.tokens)):
        found = layer.scores(128, 2, device, first=begin, rows=end - begin, tiling=TILINGS[tiling])
        layer.check(found, 2, first=begin)


@pytest.mark.parametrize("tiling", ["prefill", "hopper"])
@pytest.mark.parametrize("each", [2, 3, 4, 6])
def test_each_request_has_so_many_queries(each: int, tiling: str, device: str):
    """As in passes that verify a draft: whole, requests apart, and in parts that divide a request."""
    made = new_pass([(begin, begin + each) for begin in (300, 0, 61, 513)], device)
    made = replace(made, batch=replace(made.batch, tokens_each=each))
    layer = Layer(made, 16)
    for begin, end in ((0, 4 * each), (each, 3 * each), (1, 4 * each)):
        found = layer.scores(192, 2, device, first=begin, rows=end - begin, tiling=TILINGS[tiling])
        layer.check(found, 2, first=begin)


@pytest.mark.parametrize(
    ("each", "queries", "launched"),
    [(6, 4, ((2, 4), 6, 3)), (3, 4, ((1, 4), 3, 3)), (5, 2, ((3, 4), 5, 2)), (None, 4, ((6, 1), 24, 4))],
)
def test_no_tile_has_queries_of_two_requests(
    each: int | None, queries: int, launched: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, device: str
):
    """Each tile reads its request's keys, so one of two requests reads those of both."""
    found: list[tuple[Any, ...]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *given, **options: found.append(((grid[0], grid[2]), *given[13:15]))

    monkeypatch.setattr(indexer_scores, "_scores_kernel", Launched())
    made = new_pass([(300, 300 + (each or 6)) for _ in range(4)], device)
    made = replace(made, batch=replace(made.batch, tokens_each=each))
    Layer(made, 16).scores(128, 2, device, tiling=replace(HOPPER_PREFILL, queries=queries))
    assert found == [launched]


def test_exact_keys(device: str):
    made = new_pass([(300, 305), (7, 9), (80, 81)], device)
    layer = Layer(made, 16, exact=True)
    layer.check(layer.scores(80, 1, device, tiling=None), 1)


def test_more_visible_than_columns(device: str):
    made = new_pass([(400, 401), (90, 91)], device)
    layer = Layer(made, 16)
    layer.check(layer.scores(70, 4, device, tiling=None), 4)


@pytest.mark.parametrize("tiling", TILINGS)
def test_scores_do_not_depend_on_the_company(tiling: str, device: str):
    """The same query and keys: the same bits in a prompt, in another tile of it and alone."""
    made = new_pass([(300, 309), (500, 501)], device)
    layer = Layer(made, 64)
    found = layer.scores(130, 2, device, tiling=TILINGS[tiling])
    alone = [layer.scores(130, 2, device, first=i, rows=1, tiling=TILINGS[tiling]) for i in range(10)]
    shifted = layer.scores(130, 2, device, first=3, rows=7, tiling=TILINGS[tiling])
    for part, whole in ((torch.cat(alone), found), (shifted, found[3:])):
        if ON_GPU:
            assert torch.equal(part.view(torch.int32), whole.view(torch.int32))
        # Interpreted products are a BLAS', whose order of sums may depend on where a row stands: on some hosts it does.
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [64, 5])
def test_programs_prepare_the_reference_query(heads: int, dtype: torch.dtype, device: str):
    """Bit for bit: scores of raw queries are those of queries that were prepared before, whatever is in them."""
    ends = [40, 511, 130, 300, 77, 1023, 260]
    made = new_pass([(end - 1, end) for end in ends], device)
    layer = Layer(made, heads)
    raw = adversarial_queries(heads).to(dtype)
    layer.raw = torch.cat([raw, torch.full_like(raw[:, :1], torch.nan)], dim=1)[:, :heads]
    for tiling in (DECODE, SINGLE):
        found = layer.scores(256, 2, device, tiling=tiling)
        expected = layer.scores(256, 2, device, tiling=replace(tiling, prepares=False))
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_relu_comes_before_the_weight(device: str):
    """Heads clipped to zero leave exactly zero, whatever their weights."""
    made = new_pass([(0, 41)], device)
    layer = Layer(made, 16)
    last = torch.zeros(16, 128)
    last[:, 0] = -1.0  # the Hadamard matrix makes it a row of equal numbers
    layer.raw[40] = last
    index_entry.write_rows(layer.pages, PAGE, made.plan.csa_entry_slots[0], torch.ones(10, 128))
    found = layer.scores(10, 1, device, first=40, rows=1, tiling=DECODE)
    assert bool((found == 0).all())
    layer.raw[40], layer.raw_weights[40] = -last, -1.0
    found = layer.scores(10, 1, device, first=40, rows=1, tiling=DECODE)
    assert torch.allclose(found, torch.tensor(-16.0 * 128 * 128**-0.5 * layer.factor))


@pytest.mark.parametrize(
    ("queries", "keys", "splits"),
    [
        *((1, 1024, 8), (8, 1024, 8), (64, 1024, 2), (256, 1024, 1)),
        *((1, 16384, 128), (8, 16384, 16), (64, 16384, 6), (256, 16384, 3)),
        *((1, 262144, 132), (8, 262144, 49), (64, 262144, 6)),
    ],
)
def test_decode_has_the_splits_that_were_fastest(queries: int, keys: int, splits: int):
    """On an H200, by ``launch/results/tunings_h200.md``; at some sizes others were as fast."""
    assert choose_splits(queries, keys // 128, 132, DECODE) == splits


def test_splits_of_other_sizes():
    assert choose_splits(1, 7, 132, DECODE) == 7
    assert choose_splits(2, 4096, 132, DECODE) == DECODE.programs * 132 // 2
    assert choose_splits(133, 4096, 132, DECODE) == 5, "of 2 and 5, which fill 67 and 84 % of two turns"
    assert choose_splits(64, 4096, 132, replace(DECODE, programs=8)) == 16
    assert choose_splits(100000, 4096, 132, DECODE) == choose_splits(100000, 4096, 132, PREFILL) == 1


def test_refusals(device: str):
    made = new_pass([(0, 5)], device)
    q, weights = torch.zeros(5, 16, 128, device=device), torch.zeros(5, 16, device=device)
    cos_sin = torch.zeros(5, 64, device=device)
    pages = torch.zeros(2, 64 * 132, dtype=torch.uint8, device=device)
    scores = torch.zeros(5, 64, device=device)
    good = (q, weights, cos_sin, 0.1, pages, 64, made.batch, 8, scores)
    for index, bad, message in [
        (0, q[:4], "weights: expected shape"),
        (0, q[..., :64], "q: expected shape"),
        (0, q.half(), "q: expected dtype"),
        (1, weights[:, :8], "weights: expected shape"),
        (1, weights.half(), "weights: expected dtype"),
        (2, cos_sin[:, :32].contiguous(), "rope_dim of cos_sin"),
        (4, pages[:, :-4], "pages: expected pages of 64"),
        (4, pages.float(), "pages: expected dtype"),
        (5, 128, "page_size: expected one of"),
        (8, scores.half(), "scores: expected dtype"),
        (8, scores.T, "scores: expected the last dimension"),
        (8, scores[:4], "q: expected shape"),
    ]:
        with pytest.raises(OperandError, match=message):
            index_scores(*cast(Any, (*good[:index], bad, *good[index + 1 :])))
    with pytest.raises(OperandError, match="H of q"):
        index_scores(q.new_zeros(5, 128, 128), q.new_zeros(5, 128), *good[2:])
    with pytest.raises(OperandError, match="first: expected a value"):
        index_scores(*good, first=1)
    queries = torch.zeros(5, 16, 128, device=device).to(torch.float8_e4m3fn)
    for index, bad, message in [
        (4, queries.float(), "queries: expected dtype"),
        (4, queries[:, :8], "queries: expected shape"),
        (5, weights.half(), "scaled: expected dtype"),
    ]:
        arguments: list[Any] = [q, weights, cos_sin, 0.1, queries, weights]
        arguments[index] = bad
        with pytest.raises(OperandError, match=message):
            prepare_queries(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_million_tokens(tokens: int, device: str):
    """As far as a context goes, and a pool beyond 2 GiB whose pages are far apart."""
    end = 1 << 20
    made = new_pass([(end - tokens, end)], device)
    layer = Layer(made, 64)
    wide = torch.zeros(made.pages, 1 << 19, dtype=torch.uint8, device=device)
    wide[:, : 64 * 132] = layer.pages.to(device)
    scores = torch.full((tokens, 262144), torch.nan, device=device)
    index_scores(*layer.queries(device, slice(None)), wide, PAGE, made.batch, 512, scores)
    layer.check(scores.cpu(), 512)


def launches() -> None:
    batch, tokens = new_pass([(0, 16)], "cpu").batch, 16
    q, weights = torch.zeros(tokens, 64, 128, dtype=torch.bfloat16), torch.zeros(tokens, 64)
    given = (q, weights, torch.zeros(tokens, 64), 0.1)
    pages, exact = torch.zeros(2, 64 * 132, dtype=torch.uint8), torch.zeros(2, 64 * 128, dtype=torch.bfloat16)
    scores = torch.zeros(tokens, 4096)
    for tiling in TILINGS.values():
        index_scores(*given, pages, PAGE, batch, 512, scores, tiling=tiling)
    for tiling in (DECODE, PREFILL):
        index_scores(*given, exact, PAGE, batch, 512, scores, tiling=tiling)


SPILLED = {90: 32, 100: 320}
"""Bytes a thread of the tiling for Hopper: there nothing of the loop over pages."""


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert sorted(usage.kernel for usage in found) == ["_query_kernel"] * 2 + ["_scores_kernel"] * 5
    for usage in found:
        if usage.warps == HOPPER_PREFILL.warps:
            assert usage.registers <= 128 and usage.stack <= SPILLED[architecture], usage
        else:
            usage.require_no_spills()
        usage.require_exact_arithmetic()
        if usage.kernel == "_query_kernel":
            assert usage.count("fma") == 0
        else:
            assert usage.count({90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture]) > 0, usage
            assert usage.count("cp.async.cg") > 4, "a step's keys are asked for when the step begins"
