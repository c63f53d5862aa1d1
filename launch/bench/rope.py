"""Rotations and the store of key-value entries, at the shapes of Flash and Pro. Peers: SGLang's, if installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.kv_entry import ENTRY_BYTES, norm_rope_store_kv, page_bytes
from nvfp4_sgl.triton_kernels.rope import apply_rope_, rms_norm_rope, rope_turns

from . import Case

TOKENS = (1, 8, 64, 256, 8192)
HEADS = {"flash": 64, "pro": 128}
INDEX_HEADS = 64
EPS, PAGE_SIZE, CONTEXT = 1e-6, 256, 65536


def cases() -> Iterator[Case]:
    frequencies = inverse_frequencies(64, 160000.0).cuda()
    for tokens in TOKENS:
        positions = torch.randint(0, CONTEXT, (tokens,), device="cuda")
        turns = torch.empty(tokens, 64, device="cuda")
        fill = partial(rope_turns, positions, frequencies, turns)
        fill()
        yield Case(f"rope_turns/{tokens}", fill, positions.nbytes + turns.nbytes)

        for model, heads in HEADS.items():
            q = torch.randn(tokens, heads, 512, device="cuda", dtype=torch.bfloat16)
            out = torch.empty_like(q)
            yield Case(
                f"rms_norm_rope/{model}/{tokens}x{heads}x512",
                partial(rms_norm_rope, q, None, EPS, turns, out),
                2 * q.nbytes + turns.nbytes,
                peers=_sglang("fused_q_norm_rope", q, out, EPS, _table(frequencies), positions),
            )
            yield _rotation(
                f"apply_rope inverse/{model}/{tokens}x{heads}x512", out, turns, positions, frequencies, True
            )
        index_q = torch.randn(tokens, INDEX_HEADS, 128, device="cuda", dtype=torch.bfloat16)
        yield _rotation(f"apply_rope/index/{tokens}x{INDEX_HEADS}x128", index_q, turns, positions, frequencies, False)

        keys = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
        weight = torch.ones(512, device="cuda", dtype=torch.bfloat16)
        pages = torch.zeros(64, page_bytes(PAGE_SIZE), device="cuda", dtype=torch.uint8)
        slots = torch.randperm(64 * PAGE_SIZE, device="cuda")[:tokens]
        yield Case(
            f"norm_rope_store_kv/{tokens}x512",
            partial(norm_rope_store_kv, keys, weight, EPS, turns, slots, pages, PAGE_SIZE),
            keys.nbytes + turns.nbytes + slots.nbytes + tokens * ENTRY_BYTES,
            peers=_sglang(
                "fused_k_norm_rope_flashmla",
                *(keys, weight, EPS, _table(frequencies), positions, slots, pages, PAGE_SIZE),
            ),
        )


def _rotation(
    name: str,
    x: torch.Tensor,
    turns: torch.Tensor,
    positions: torch.Tensor,
    frequencies: torch.Tensor,
    inverse: bool,
) -> Case:
    tail = x[..., -64:]
    return Case(
        name,
        partial(apply_rope_, x, turns, inverse=inverse),
        2 * tail.numel() * tail.element_size() + turns.nbytes,
        peers=_sglang("fused_rope_inplace", tail, None, _table(frequencies), positions, inverse),
    )


def _table(frequencies: torch.Tensor) -> torch.Tensor:
    """complex64 [CONTEXT, 32], the table of all positions that SGLang's kernels read."""
    angles = torch.arange(CONTEXT, device=frequencies.device, dtype=torch.float32)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def _sglang(function: str, *arguments: Any) -> dict[str, Callable[[], object]]:
    if importlib.util.find_spec("sglang") is None:
        return {}
    from sglang.kernels.ops.attention.dsv4 import norm_rope

    return {"sglang": partial(getattr(norm_rope, function), *arguments)}
