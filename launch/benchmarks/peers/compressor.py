"""Peers of the compressors in bench_kernels: SGLang's CUDA kernels, two launches a compressor after a plan that all
layers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.families import Peer, relative_error
from benchmarks.peers import foreign, installed
from nvfp4_sgl.cache.layout import STATE_RING
from nvfp4_sgl.triton_kernels.attention_inputs.compressor import Compression
from nvfp4_sgl.triton_kernels.plan.batch import PAGE_TOKENS
from nvfp4_sgl.triton_kernels.plan.resolve import Plan

COMPRESS = "sglang.kernels.ops.attention.dsv4.compress"
_POOL, _STORE = foreign(COMPRESS, "compress_forward"), foreign(COMPRESS, "compress_norm_rope_store")
_DECODE = foreign(COMPRESS, "CompressorDecodePlan.generate")
_PREFILL = foreign(COMPRESS, "CompressorPrefillPlan.generate")

Ours = Callable[[list[Compression]], object]


def compress_peers(calls: list[Compression], plan: Plan, frequencies: Tensor, ours: Ours) -> dict[str, Peer]:
    """Peers of the compressors of one layer, all of one ratio.

    Args:
        ours: does what the case does, on other buffers.
    """
    if not installed("sglang"):
        return {}
    ratio, batch = calls[0].compressor.ratio, plan.batch
    angles = torch.arange(plan.slots.shape[1], device=frequencies.device, dtype=torch.float32)[:, None] * frequencies
    table = torch.polar(torch.ones_like(angles), angles)
    full = plan.slots[batch.requests[batch.owners.long()], batch.positions].long()
    inputs = [torch.cat([call.kv, call.score], dim=1) for call in calls]
    # Of ratio 4 first the halves that overlap, then the others.
    biases = [torch.cat(call.compressor.ape.split(call.compressor.size, dim=1)) for call in calls]
    norms, slots = [call.compressor.norm.float() for call in calls], full // ratio
    plans: list[Any] = []

    def run_on(copies: list[Compression]) -> None:
        if not plans:
            plans.append(_plan(plan, ratio))
        for call, rows, ape, norm in zip(copies, inputs, biases, norms, strict=True):
            compressor, n = call.compressor, call.compressor.size
            state = call.state.view(-1, ratio, 2 * compressor.width)
            pooled = _POOL(state, rows, ape, plans[0], head_dim=n, compress_ratio=ratio)
            _STORE(
                pooled,
                plans[0],
                norm_weight=norm,
                norm_eps=compressor.norm_eps,
                freq_cis=table,
                out_loc=slots,
                kvcache=call.pages,
                page_size=call.page_size,
            )

    def error() -> float:
        """Relative error of the entries' bytes, from the same states; the states themselves keep different rows."""
        mine, theirs = _copies(calls), _copies(calls)
        ours(mine)
        run_on(theirs)
        return max(relative_error(b.pages, a.pages) for a, b in zip(mine, theirs, strict=True))

    own = _copies(calls)
    return {"sglang (nvcc)": Peer(lambda: run_on(own), error, limit=0.05)}


def _copies(calls: list[Compression]) -> list[Compression]:
    return [replace(call, state=call.state.clone(), pages=call.pages.clone()) for call in calls]


def _plan(plan: Plan, ratio: int) -> Any:
    """The lengths of a prefill's requests are the host's."""
    batch = plan.batch
    added = batch.bounds.diff().long()
    places = {"req_to_token": plan.slots, "full_to_state": plan.full_to_swa, "req_pool_indices": batch.requests}
    sizes = {"swa_page_size": PAGE_TOKENS, "ring_size": STATE_RING[ratio]}
    lengths = batch.starts + added
    if batch.is_decode:
        return _DECODE(ratio, seq_lens=lengths, **places, **sizes)
    return _PREFILL(
        ratio, seq_lens=lengths.cpu(), extend_lens=added.cpu(), num_q_tokens=batch.tokens, **places, **sizes
    )
