"""The lightning indexer: queries, scores and the choice of entries, in decoding and prefill. Flash and Pro differ in
topk alone. Peers: ``indexer_peers``, torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from indexer_peers import query_peers, score_peers, selection_peers
from torch import Tensor

from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.batch import PAGE_TOKENS, Batch
from nvfp4_sgl.triton_kernels.index_entry import ENTRY_BYTES, page_bytes
from nvfp4_sgl.triton_kernels.indexer import index_query, index_scores
from nvfp4_sgl.triton_kernels.rope import rope_turns
from nvfp4_sgl.triton_kernels.topk import new_workspace, select_entries

from . import Case

HEADS, DIM, PAGE = 64, 128, PAGE_TOKENS // 4
FACTOR = DIM**-0.5 * HEADS**-0.5
TOPK = {"flash": 512, "pro": 1024}
CONTEXTS = {"4k": 4096, "64k": 65536, "1m": 1 << 20}
DECODING = (1, 8, 64, 256)
PROMPT = 8192
SCORES = 1 << 26
"""That are held at once, in prefill."""
ENTRIES = 1 << 24
"""That are cached at most, over all requests."""


def _batch(requests: int, tokens: int, context: int) -> Batch:
    """Each request's last tokens of a context of its own."""
    pages = torch.randperm(requests * context // PAGE_TOKENS, device="cuda", dtype=torch.int32)
    slots = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device="cuda")).int().view(requests, context)
    bounds = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * tokens
    return Batch(
        positions=torch.arange(context - tokens, context, device="cuda").repeat(requests),
        owners=torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(tokens),
        starts=torch.full((requests,), context - tokens, device="cuda", dtype=torch.int32),
        bounds=bounds,
        requests=torch.arange(requests, device="cuda"),
        slots=slots,
        full_to_swa=torch.zeros(1, device="cuda", dtype=torch.int64),
    )


def _codes(*shape: int) -> Tensor:
    """E4M3 of both signs below 2: no NaN among them."""
    return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8) & 0xBF


def _pages(entries: int) -> Tensor:
    pages = _codes(entries // PAGE, page_bytes(PAGE))
    pages[:, PAGE * DIM :].view(torch.float32).fill_(1.0)
    return pages


def _all_scores(codes: Tensor, scaled: Tensor, pages: Tensor, batch: Batch, scores: Tensor) -> None:
    """Of all tokens, as many at once as there is room for."""
    for first in range(0, len(codes), len(scores)):
        part = slice(first, first + len(scores))
        index_scores(codes[part], scaled[part], pages, PAGE, batch, 0, scores[: len(codes[part])], first=first)


def cases() -> Iterator[Case]:
    for tokens in (*DECODING, PROMPT):
        q = torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        weights = torch.randn(tokens, HEADS, device="cuda").bfloat16().float()
        turns = torch.empty(tokens, 64, device="cuda")
        positions, frequencies = torch.arange(tokens, device="cuda"), inverse_frequencies(64, 160000.0).cuda()
        rope_turns(positions, frequencies, turns)
        codes, scaled = _codes(tokens, HEADS, DIM), torch.empty_like(weights)
        yield Case(
            f"index_query/{tokens}x{HEADS}x{DIM}",
            partial(index_query, q, weights, turns, FACTOR, codes, scaled),
            bytes=q.nbytes + weights.nbytes + turns.nbytes + codes.nbytes + scaled.nbytes,
            peers=query_peers(q, weights, FACTOR, frequencies, positions, codes, scaled),
        )
    for name, context in CONTEXTS.items():
        for requests in DECODING:
            if requests * context // 4 <= ENTRIES:
                yield from _scored(f"decode/{name}", _batch(requests, 1, context), context)
        yield from _scored(f"prefill/{name}", _batch(1, min(PROMPT, context), context), context)


def _scored(name: str, batch: Batch, context: int) -> Iterator[Case]:
    """Scores of all entries that are seen, and the choice among as many at once as scores are held."""
    tokens, columns, requests = batch.tokens, context // 4, batch.requests.shape[0]
    codes, scaled = _codes(tokens, HEADS, DIM), torch.randn(tokens, HEADS, device="cuda")
    pages = _pages(requests * columns)
    scores = torch.randn(min(tokens, SCORES // columns), columns, device="cuda")
    seen = int(((batch.positions + 1) // 4).sum())
    yield Case(
        f"index_scores/{name}/{tokens}x{columns}",
        partial(_all_scores, codes, scaled, pages, batch, scores),
        bytes=requests * columns * ENTRY_BYTES + codes.nbytes + scaled.nbytes + 4 * seen,
        flops=seen * HEADS * 2 * DIM // 2,  # FP8
        peers=score_peers(codes, scaled, pages, batch, scores),
    )
    rows = len(scores)
    for model, topk in TOPK.items():
        slots = torch.empty(rows, topk, device="cuda", dtype=torch.int32)
        lengths = torch.empty(rows, device="cuda", dtype=torch.int32)
        workspace = new_workspace(rows, columns, topk, "cuda")
        first = tokens - rows
        yield Case(
            f"select_entries/{model}/{name}/{rows}x{columns}",
            partial(select_entries, scores, batch, topk, slots, lengths, first=first, workspace=workspace),
            bytes=4 * int(((batch.positions[first:] + 1) // 4).sum()) + slots.nbytes + lengths.nbytes,
            peers={
                "torch.topk": partial(torch.topk, scores, min(topk, columns), sorted=False),
                **selection_peers(scores, batch, first, slots),
            },
        )
