"""Normalise, rotate and pack key/value entries and store them in SGLang's pages (specification §4.4).

The format is that of ``nvfp4_sgl.formats.kv_entry``, bit for bit. An entry is a row of 512 values in 584 bytes: the
first 448 as E4M3 in 7 blocks of 64, each with a UE8M0 scale; the last 64, which RoPE rotates, as bf16::

    data   576 bytes: 448 × e4m3 | 64 × bf16
    scales   8 bytes: 7 × ue8m0  | one byte 0

A page of P rows is P × 576 bytes of data, then P × 8 bytes of scales, rounded up to a multiple of 576 bytes in all;
slot = page · P + row. Rows are quantised from fp32, without a rounding to bf16 on the way.

Supports rows of 512 values of which the last 64 are rotated, no other sizes. Floor per entry: the row read once and 584
bytes written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks
from nvfp4_sgl.formats.kv_entry import FORMAT
from nvfp4_sgl.limits import ROPE_DIM

from ..common.overlap import OVERLAPPED, after_previous
from ..common.rope import load_cos_sin, mean_square_scale, require_cos_sin, require_norm_weight, rotate
from ..common.rounding import UNFUSED, encode_e4m3_bytes, encode_ue8m0_ceil, finite, reciprocal_ue8m0, round_to_bf16
from .pool import last_slot

DIM, ENTRY_BYTES, page_bytes = FORMAT.dim, FORMAT.entry_bytes, FORMAT.page_bytes

VALUE_MAX = tl.constexpr(1.875 * 2.0**127)
"""Values are clamped to this: the largest multiple of a scale that is finite in fp32 when read back."""
AMAX_FLOOR = tl.constexpr(1e-4)
INVERSE_E4M3_MAX = tl.constexpr(1.0 / 448.0)
"""A product with this factor, rounded to fp32, has the exponent of the exact quotient for every fp32 maximum."""


@triton.jit
def store_kv_entry(values, even, odd, slot, pages_ptr, page_stride, PAGE_SIZE: tl.constexpr):
    """Pack one row and store it.

    Args:
        values: fp32 [8, 64], the row; its last 64 values are ignored.
        even, odd: fp32 [32] each, the row's last 64 values, pair by pair.
        slot: int64, inside the pool.
        pages_ptr: uint8, at an even address.
        page_stride: bytes, even.
        PAGE_SIZE: entries of a page.
    """
    values = tl.minimum(tl.maximum(finite(values), -VALUE_MAX), VALUE_MAX)
    amax = tl.maximum(tl.max(tl.abs(values), axis=1), AMAX_FLOOR)
    exponent = encode_ue8m0_ceil(amax * INVERSE_E4M3_MAX)
    codes = encode_e4m3_bytes(values * reciprocal_ue8m0(exponent)[:, None])

    page = pages_ptr + slot // PAGE_SIZE * page_stride
    data = page + slot % PAGE_SIZE * 576
    block = tl.arange(0, 8)
    column = block[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(data + column, codes, mask=column < 448)

    tail = tl.reshape(tl.join(round_to_bf16(finite(even)), round_to_bf16(finite(odd))), (64,)).to(tl.bfloat16)
    tl.store((data + 448).to(tl.pointer_type(tl.bfloat16), bitcast=True) + tl.arange(0, 64), tail)
    scales = page + PAGE_SIZE * 576 + slot % PAGE_SIZE * 8
    tl.store(scales + block, tl.where(block < 7, exponent, 0).to(tl.uint8))


@triton.jit
def store_row(
    x, weight, cos_sin, slot, pages, eps, page_stride, last_slot, NORM_ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    """Pack the row at ``x`` into ``slot`` (int64), normalised and rotated first if NORM_ROPE.

    weight: fp32 or bf16 [512]. cos_sin: the row's fp32 [64]; both are read if NORM_ROPE only. last_slot: of the pool; a
    row whose slot is outside is not stored.
    """
    # All loads are issued at once, before the slot is known: a row is short, and most of its time is spent waiting.
    column = tl.arange(0, 8)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tail = 448 + tl.arange(0, 64)
    row, last = tl.load(x + column), tl.load(x + tail)
    if NORM_ROPE:
        weights, last_weights = tl.load(weight + column), tl.load(weight + tail)
        cos, sin = load_cos_sin(cos_sin, 32)
    values = row.to(tl.float32)
    even, odd = tl.split(tl.reshape(last.to(tl.float32), (32, 2)))
    if NORM_ROPE:
        square_sum = tl.sum(tl.sum(values * values, axis=1), axis=0)
        scale = mean_square_scale(square_sum, 512.0, eps)
        values = values * scale * weights.to(tl.float32)
        even_weight, odd_weight = tl.split(tl.reshape(last_weights.to(tl.float32), (32, 2)))
        even, odd = rotate(even * scale * even_weight, odd * scale * odd_weight, cos, sin)
    if (slot >= 0) & (slot <= last_slot):
        store_kv_entry(values, even, odd, slot, pages, page_stride, PAGE_SIZE)


@triton.jit
def _store_kernel(
    x,
    weight,
    cos_sin,
    slots,
    pages,
    eps,
    x_row,
    page_stride,
    last_slot,
    NORM_ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    store_row(
        x + row * x_row, weight, cos_sin + row * 64, slot, pages, eps, page_stride, last_slot, NORM_ROPE, PAGE_SIZE
    )


def store_kv_entries(rows: Tensor, slots: Tensor, pages: Tensor, page_size: int) -> None:
    """Pack finished rows and store them in their slots (specification §4.4).

    Args:
        rows: bf16 or fp32 [T, 512], the last dimension contiguous.
        slots: int32 or int64 [T], contiguous, distinct; a row whose slot is outside the pool (−1 for padding) is not
            stored.
        pages: uint8 [pages, >= page_bytes(page_size)], rows contiguous, each page at a multiple of 16 bytes; written in
            place, other bytes are left alone.
        page_size: entries of a page.

    Rounding: bit-equal to ``kv_entry.pack``. Floor: T·(2·512 + 584) bytes for bf16 rows.

    Raises:
        OperandTypeError: a dtype is not one of the above.
        OperandValueError: a shape, stride, alignment, page size or device is not as above.
    """
    _launch(rows, None, 0.0, None, slots, pages, page_size)


def norm_rope_store_kv(
    x: Tensor, weight: Tensor, eps: float, cos_sin: Tensor, slots: Tensor, pages: Tensor, page_size: int
) -> None:
    """Normalise new keys by their root mean square, rotate, pack and store them (specification §4.4).

    Args:
        x: bf16 or fp32 [T, 512], the last dimension contiguous: the key projection.
        weight: bf16 or fp32 [512], contiguous: ``kv_norm``.
        eps: added to the mean square.
        cos_sin: fp32 [T, 64], contiguous, from ``common.rope.rope_cos_sin``.
        slots, pages, page_size: as in :func:`store_kv_entries`.

    Rounding: fp32 until the format's own rounding. The sum of squares is added in an order of its own, so a normalised
    value may differ from the reference's by 2 units in the last place of fp32, and next to a tie a code may then differ
    by one. Floor: T·(2·512 + 584) bytes for bf16 keys, weight and cos_sin aside.

    Raises:
        OperandTypeError: a dtype is not one of the above.
        OperandValueError: a shape, stride, alignment, page size or device is not as above.
    """
    require_norm_weight(weight, DIM)
    rope = require_cos_sin("cos_sin", cos_sin, x.shape[0], DIM)
    checks.require_one_of("rope_dim of cos_sin", rope, (ROPE_DIM,))
    _launch(x, weight, eps, cos_sin, slots, pages, page_size)


def _launch(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    slots: Tensor,
    pages: Tensor,
    page_size: int,
) -> None:
    checks.require_dtype("rows", x, torch.bfloat16, torch.float32)
    checks.require_shape("rows", x, (x.shape[0], DIM), "[T, 512]")
    checks.require_rows("rows", x)
    rows = x.shape[0]
    checks.require_shape("slots", slots, (rows,), "[T]")
    checks.require_dtype("slots", slots, torch.int32, torch.int64)
    checks.require_contiguous("slots", slots)
    checks.require_pages("pages", pages, page_bytes(page_size), page_size)
    checks.require_same_device("rows", x, weight=weight, cos_sin=cos_sin, slots=slots, pages=pages)
    if rows:
        _store_kernel[(rows,)](
            x,
            x if weight is None else weight,
            x if cos_sin is None else cos_sin,
            slots,
            pages,
            eps,
            x.stride(0),
            pages.stride(0),
            last_slot(pages, page_size),
            weight is not None,
            page_size,
            num_warps=1,
            **UNFUSED,
            **OVERLAPPED,
        )
