"""Peers of the indexer in bench_kernels: DeepGEMM's GEMMs and SGLang's CUDA kernels, as its server calls them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.families import Peer, relative_error
from benchmarks.peers import foreign, installed
from nvfp4_sgl.triton_kernels.plan.batch import PAGE_TOKENS, Batch

DSV4 = "sglang.kernels.ops.attention.dsv4"
PAGE, DIM = PAGE_TOKENS // 4, 128


def query_peers(
    q: Tensor, weights: Tensor, factor: float, frequencies: Tensor, positions: Tensor, codes: Tensor, scaled: Tensor
) -> dict[str, Peer]:
    """Peers of ``prepare_queries``, whose weights must be values of bf16, as SGLang's are."""
    if not installed("sglang"):
        return {}
    angles = torch.arange(int(positions.max()) + 1, device=q.device, dtype=torch.float32)[:, None] * frequencies
    table = torch.polar(torch.ones_like(angles), angles)
    function = foreign(f"{DSV4}.norm_rope", "fused_q_indexer_rope_hadamard_quant")
    run = partial(function, q, weights.bfloat16(), factor, table, positions)

    def error() -> float:
        """Relative error of codes times weights, to which the scales belong."""
        their_codes, their_weights = run()
        ours = codes.view(torch.float8_e4m3fn).float() * scaled[..., None]
        return relative_error(their_codes.float() * their_weights, ours)

    return {"sglang (nvcc)": Peer(run, error, limit=0.05)}


def score_peers(
    codes: Tensor, scaled: Tensor, pages: Tensor, batch: Batch, scores: Tensor, preparations: dict[str, Peer]
) -> dict[str, Peer]:
    """Peers of ``index_scores`` of all tokens, ``len(scores)`` tokens at once; ``scores`` keeps the last ones.

    The GEMMs take our ``codes`` and ``scaled``, but SGLang's preparation of its own, if there is one among
    ``preparations``, is run before them.
    """
    if not installed("deep_gemm"):
        return {}
    queries, visible = codes.view(torch.float8_e4m3fn), _visible(batch)
    rows, columns = scores.shape
    parts = [slice(first, min(first + rows, len(codes))) for first in range(0, len(codes), rows)]

    def peer(products: Any) -> Peer:
        def run() -> Tensor:
            for preparation in preparations.values():
                preparation.run()
            logits: Tensor = products()
            return logits

        def error() -> float:
            last = parts[-1]
            seen = torch.arange(columns, device=codes.device) < visible[last, None]
            theirs, ours = run()[:, :columns], scores[: last.stop - last.start]
            return relative_error(torch.where(seen, theirs, 0.0), torch.where(seen, ours, 0.0))

        return Peer(run, error)

    paged = foreign("deep_gemm", "fp8_paged_mqa_logits")
    schedule, processors = foreign("deep_gemm", "get_paged_mqa_logits_metadata"), foreign("deep_gemm", "get_num_sms")
    table, keys = _page_table(batch), pages.view(len(pages), PAGE, 1, DIM + 4)
    schedules: list[Tensor] = []

    def run_paged() -> Tensor:
        """Schedules are made once for all layers."""
        if not schedules:
            schedules.extend(schedule(visible[part, None], PAGE, processors()) for part in parts)
        for part, made in zip(parts, schedules, strict=True):
            logits: Tensor = paged(
                *(queries[part].unsqueeze(1), keys, scaled[part], visible[part, None], table[part], made, columns),
                clean_logits=False,
            )
        return logits

    before = "sglang query + " if preparations else ""
    peers = {f"{before}deep_gemm fp8_paged_mqa_logits (nvcc)": peer(run_paged)}
    if not batch.is_decode and batch.requests.shape[0] == 1:
        flat = foreign("deep_gemm", "fp8_mqa_logits")
        order = batch.pages[0].long() // PAGE_TOKENS
        ordered = pages[order]
        key_codes = ordered[:, : PAGE * DIM].reshape(-1, DIM).view(torch.float8_e4m3fn)
        key_scales = ordered[:, PAGE * DIM :].contiguous().view(torch.float32).view(-1)
        begin = torch.zeros_like(visible)

        def run_flat() -> Tensor:
            for part in parts:
                logits: Tensor = flat(
                    *(queries[part], (key_codes, key_scales), scaled[part], begin[part], visible[part]),
                    clean_logits=False,
                    max_seqlen_k=columns,
                )
            return logits

        peers[f"{before}deep_gemm fp8_mqa_logits, keys gathered before (nvcc)"] = peer(run_flat)
    return peers


def selection_peers(scores: Tensor, batch: Batch, first: int, slots: Tensor) -> dict[str, Peer]:
    """Peers of ``select_entries``: slots in any order. Its plan is made once for all layers."""
    if not installed("sglang"):
        return {}
    visible, table = _visible(batch)[first:].contiguous(), _page_table(batch)[first:]
    own = torch.empty_like(slots)
    plans: list[Tensor] = []
    plan, select = foreign(f"{DSV4}.topk", "plan_topk_v2"), foreign(f"{DSV4}.topk", "topk_transform_paged_v2")

    def run() -> None:
        if not plans:
            plans.append(plan(visible))
        select(scores, visible, table, own, PAGE, plans[0])

    return {
        "sglang topk v2 (nvcc)": Peer(run, lambda: relative_error(own.sort().values, slots.sort().values), limit=1e-3)
    }


def _visible(batch: Batch) -> Tensor:
    """int32 [T], ratio-4 entries that a query sees."""
    return ((batch.positions + 1) // 4).int()


def _page_table(batch: Batch) -> Tensor:
    """int32 [T, pages], each query's."""
    return (batch.pages // PAGE_TOKENS)[batch.owners.long()].contiguous()
