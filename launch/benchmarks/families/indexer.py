"""The lightning indexer: scores of raw queries and the choice of entries, in decoding and prefill; what prefill does to
its queries. Flash and Pro differ in topk alone. Peers: ``indexer_peers``, torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers.indexer import query_peers, score_peers, selection_peers
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.common.rope import rope_cos_sin
from nvfp4_sgl.triton_kernels.entries.index_entry import ENTRY_BYTES, page_bytes
from nvfp4_sgl.triton_kernels.indexer.query import prepare_queries
from nvfp4_sgl.triton_kernels.indexer.scores import index_scores
from nvfp4_sgl.triton_kernels.indexer.topk import new_candidates, select_entries
from nvfp4_sgl.triton_kernels.plan.batch import PAGE_TOKENS, Batch

from . import Case, Peer

HEADS, DIM, PAGE = 64, 128, PAGE_TOKENS // 4
FACTOR = DIM**-0.5 * HEADS**-0.5
TOPK = {"flash": 512, "pro": 1024}
CONTEXTS = {"4k": 4096, "64k": 65536, "1m": 1 << 20}
DECODING = (1, 8, 64, 256)
PROMPT = 8192
SCORES = 1 << 26
"""Scores that are held at once, in prefill."""
ENTRIES = 1 << 24
"""Entries that are cached at most, over all requests."""


def _batch(requests: int, tokens: int, context: int) -> Batch:
    """Each request's last tokens of a context of its own."""
    pages = torch.randperm(requests * context // PAGE_TOKENS, device="cuda", dtype=torch.int32)
    bounds = torch.arange(requests + 1, device="cuda", dtype=torch.int32) * tokens
    return Batch(
        positions=torch.arange(context - tokens, context, device="cuda").repeat(requests),
        owners=torch.arange(requests, device="cuda", dtype=torch.int32).repeat_interleave(tokens),
        starts=torch.full((requests,), context - tokens, device="cuda", dtype=torch.int32),
        bounds=bounds,
        requests=torch.arange(requests, device="cuda"),
        pages=(pages * PAGE_TOKENS).view(requests, -1),
        window_slots=torch.zeros(requests * tokens, 1, device="cuda", dtype=torch.int32),
        tokens_each=1 if tokens == 1 else None,
    )


def _codes(*shape: int) -> Tensor:
    """E4M3 of both signs below 2: no NaN among them."""
    return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8) & 0xBF


def _pages(entries: int) -> Tensor:
    pages = _codes(entries // PAGE, page_bytes(PAGE))
    pages[:, PAGE * DIM :].view(torch.float32).fill_(1.0)
    return pages


class _Queries:
    """Raw ones at positions of their own, and what is made of them."""

    def __init__(self, positions: Tensor):
        tokens, self.positions = len(positions), positions
        self.q = torch.randn(tokens, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.weights = torch.randn(tokens, HEADS, device="cuda").bfloat16().float()
        self.frequencies = inverse_frequencies(64, 160000.0).cuda()
        self.cos_sin = rope_cos_sin(positions, self.frequencies, torch.empty(tokens, 64, device="cuda"))
        self.codes = torch.empty(tokens, HEADS, DIM, device="cuda", dtype=torch.float8_e4m3fn)
        self.scaled = torch.empty_like(self.weights)
        self.prepare()

    def prepare(self) -> None:
        prepare_queries(self.q, self.weights, self.cos_sin, FACTOR, self.codes, self.scaled)

    def peers(self) -> dict[str, Peer]:
        return query_peers(
            self.q, self.weights, FACTOR, self.frequencies, self.positions, self.codes.view(torch.uint8), self.scaled
        )

    @property
    def bytes(self) -> int:
        return self.q.nbytes + self.weights.nbytes + self.cos_sin.nbytes


def _all_scores(queries: _Queries, pages: Tensor, batch: Batch, scores: Tensor) -> None:
    """Scores of all tokens, as many at once as there is room for."""
    for first in range(0, batch.tokens, len(scores)):
        part = slice(first, min(first + len(scores), batch.tokens))
        query = (queries.q[part], queries.weights[part], queries.cos_sin[part], FACTOR)
        index_scores(*query, pages, PAGE, batch, 0, scores[: part.stop - first], first=first)


def cases() -> Iterator[Case]:
    queries = _Queries(torch.arange(PROMPT, device="cuda"))
    yield Case(
        f"prepare_queries/{PROMPT}x{HEADS}x{DIM}",
        queries.prepare,
        bytes=queries.bytes + queries.codes.nbytes + queries.scaled.nbytes,
        peers=queries.peers(),
    )
    for name, context in CONTEXTS.items():
        for requests in DECODING:
            if requests * context // 4 <= ENTRIES:
                yield from _scored(f"decode/{name}", _batch(requests, 1, context), context)
        yield from _scored(f"prefill/{name}", _batch(1, min(PROMPT, context), context), context)


def _scored(name: str, batch: Batch, context: int) -> Iterator[Case]:
    """Scores of all entries that are seen, and the choice among as many at once as scores are held."""
    tokens, columns, requests = batch.tokens, context // 4, batch.requests.shape[0]
    queries = _Queries(batch.positions)
    pages = _pages(requests * columns)
    scores = torch.randn(min(tokens, SCORES // columns), columns, device="cuda")
    seen = int(((batch.positions + 1) // 4).sum())
    yield Case(
        f"index_scores/{name}/{tokens}x{columns}",
        partial(_all_scores, queries, pages, batch, scores),
        bytes=requests * columns * ENTRY_BYTES + queries.bytes + 4 * seen,
        flops=seen * HEADS * 2 * DIM // 2,  # FP8
        peers=score_peers(queries.codes.view(torch.uint8), queries.scaled, pages, batch, scores, queries.peers()),
    )
    rows = len(scores)
    for model, topk in TOPK.items():
        slots = torch.empty(rows, topk, device="cuda", dtype=torch.int32)
        lengths = torch.empty(rows, device="cuda", dtype=torch.int32)
        candidates = new_candidates(rows, columns, topk, "cuda")
        first = tokens - rows
        yield Case(
            f"select_entries/{model}/{name}/{rows}x{columns}",
            partial(select_entries, scores, batch, topk, slots, lengths, first=first, candidates=candidates),
            bytes=4 * int(((batch.positions[first:] + 1) // 4).sum()) + slots.nbytes + lengths.nbytes,
            peers={
                "torch.topk": partial(torch.topk, scores, min(topk, columns), sorted=False),
                **selection_peers(scores, batch, first, slots),
            },
        )
