"""The table of cos and sin, and the store of key-value entries, at the shapes of Flash and Pro.

Peers: SGLang's CUDA kernels for the same places, which nvcc compiles at their first call. They look cos and sin up in a
table of all positions; ours are computed once a pass (``rope_cos_sin``) and read by every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.peers import compared, foreign, installed
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.common.rope import rope_cos_sin
from nvfp4_sgl.triton_kernels.entries.kv_entry import ENTRY_BYTES, norm_rope_store_kv, page_bytes

from . import Case, Peer

TOKENS = (1, 8, 64, 256, 8192)
NORM_ROPE = "sglang.kernels.ops.attention.dsv4.norm_rope"
EPS, PAGE_SIZE, CONTEXT = 1e-6, 256, 65536


def cases() -> Iterator[Case]:
    frequencies = inverse_frequencies(64, 160000.0).cuda()
    table = _table(frequencies)
    for tokens in TOKENS:
        positions = torch.randint(0, CONTEXT, (tokens,), device="cuda")
        cos_sin = torch.empty(tokens, 64, device="cuda")
        fill = partial(rope_cos_sin, positions, frequencies, cos_sin)
        fill()
        yield Case(f"rope_cos_sin/{tokens}", fill, positions.nbytes + cos_sin.nbytes)

        keys = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)
        pages = torch.zeros(64, page_bytes(PAGE_SIZE), device="cuda", dtype=torch.uint8)
        slots = torch.randperm(64 * PAGE_SIZE, device="cuda")[:tokens]
        yield Case(
            f"norm_rope_store_kv/{tokens}x512",
            partial(norm_rope_store_kv, keys, weight, EPS, cos_sin, slots, pages, PAGE_SIZE),
            keys.nbytes + cos_sin.nbytes + slots.nbytes + tokens * ENTRY_BYTES,
            peers=_store_peers(keys, weight, table, positions, slots, pages),
        )


def _store_peers(
    keys: torch.Tensor,
    weight: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
) -> dict[str, Peer]:
    if not installed("sglang"):
        return {}
    own = torch.zeros_like(pages)
    store = foreign(NORM_ROPE, "fused_k_norm_rope_flashmla")
    run = partial(store, keys, weight, EPS, table, positions, slots.int(), own, PAGE_SIZE)
    return {"sglang (nvcc)": compared(run, pages, own, limit=0.03)}


def _table(frequencies: torch.Tensor) -> torch.Tensor:
    """complex64 [CONTEXT, 32], the table of all positions that SGLang's kernels read."""
    angles = torch.arange(CONTEXT, device=frequencies.device, dtype=torch.float32)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)
