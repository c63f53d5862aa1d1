"""The two latents of an attention layer in one launch: q_lora normalised, keys normalised, rotated, packed and stored.

Both are columns of the same product and neither waits for the other (DEEPSEEK_V4.md §3.1, §4.4): a program takes one of
them for one token. See :func:`streams.rms_norm` and :func:`kv_entry.norm_rope_store_kv`, whose contracts these are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import checks
from .kv_entry import DIM, ROPE_DIM, page_bytes, store_row
from .rope import require_norm_weight, require_turns
from .rounding import UNFUSED, round_for
from .streams import MAX_ROW, normalized


@triton.jit
def _latents(
    q,
    q_weight,
    q_out,
    kv,
    kv_weight,
    turns,
    slots,
    pages,
    eps,
    width,
    q_row,
    q_out_row,
    kv_row,
    page_stride,
    capacity,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + row).to(tl.int64)
        at, turn = kv + row * kv_row, turns + row * 64
        store_row(at, kv_weight, turn, slot, pages, eps, page_stride, capacity, True, PAGE_SIZE)
    else:
        column = tl.arange(0, BLOCK)
        inside = column < width
        value = tl.load(q + row * q_row + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        value = tl.reshape(normalized(value, q_weight, eps, column, inside, width, True), (BLOCK,))
        tl.store(q_out + row * q_out_row + column, round_for(value, q_out), mask=inside)


def norm_latents(
    q_lora: Tensor,
    q_norm: Tensor,
    q_out: Tensor,
    kv: Tensor,
    kv_norm: Tensor,
    eps: float,
    turns: Tensor,
    slots: Tensor,
    pages: Tensor,
    page_size: int,
) -> Tensor:
    """``rms_norm(q_lora, q_norm)``, and ``norm_rope_store_kv`` of the new keys.

    Args:
        q_lora: bf16 or fp32 [T, n], the last dimension contiguous, n up to 16384. q_norm: bf16 or fp32 [n].
        q_out: bf16 or fp32 [T, n], the last dimension contiguous; one rounding.
        kv: bf16 or fp32 [T, 512], the last dimension contiguous. kv_norm: bf16 or fp32 [512].
        eps: added to both mean squares.
        turns: fp32 [T, 64]. slots: int32 or int64 [T]; a slot outside the pool is left out.
        pages, page_size: SGLang's pages of 584-byte entries, in place.

    Returns:
        ``q_out``. Floor: ``q_lora`` and ``kv`` read once, ``q_out`` and 584 bytes a token written.
    """
    op = "norm_latents"
    tokens, width = kv.shape[0], q_lora.shape[-1]
    for name, tensor, columns in (("q_lora", q_lora, width), ("q_out", q_out, width), ("kv", kv, DIM)):
        checks.require_shape(f"{op}: {name}", tensor, (tokens, columns), "[T, n] or [T, 512]")
        checks.require_dtype(f"{op}: {name}", tensor, torch.bfloat16, torch.float32)
        checks.require_rows(f"{op}: {name}", tensor)
    checks.require_range(f"{op}: columns of q_lora", width, 1, MAX_ROW)
    require_norm_weight(q_norm, width)
    require_norm_weight(kv_norm, DIM)
    rope = require_turns(f"{op}: turns", turns, tokens, DIM)
    checks.require_one_of(f"{op}: rope_dim of turns", rope, (ROPE_DIM,))
    checks.require_shape(f"{op}: slots", slots, (tokens,), "[T]")
    checks.require_dtype(f"{op}: slots", slots, torch.int32, torch.int64)
    checks.require_contiguous(f"{op}: slots", slots)
    checks.require_pages(f"{op}: pages", pages, page_bytes(page_size), page_size)
    others = {"q_norm": q_norm, "q_out": q_out, "kv": kv, "kv_norm": kv_norm, "turns": turns, "slots": slots}
    checks.require_same_device("q_lora", q_lora, pages=pages, **others)
    if tokens:
        _latents[(tokens, 2)](
            q_lora, q_norm, q_out, kv, kv_norm, turns, slots, pages, eps, width, q_lora.stride(0), q_out.stride(0),
            kv.stride(0), pages.stride(0), pages.shape[0] * page_size, PAGE_SIZE=page_size,
            BLOCK=triton.next_power_of_2(width), num_warps=4, **UNFUSED,
        )  # fmt: skip
    return q_out
