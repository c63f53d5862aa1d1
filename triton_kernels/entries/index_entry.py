"""Rotate indexer keys by the Hadamard matrix, pack them and store them in SGLang's pages (specification §4.5, §5).

The format is that of ``nvfp4_sgl.formats.index_entry``, bit for bit. A key takes 132 bytes: 128 values as E4M3 and one
fp32 scale, the row's largest magnitude over 448. A page of P keys is P × 128 bytes of codes, then P × 4 bytes of
scales; slot = page · P + row. Queries take the same form, so their kernel uses :func:`hadamard128` and
:func:`pack_index_row`, too.

Supports keys of 128 values only. Floor per key: the row read once and 132 bytes written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks
from nvfp4_sgl.formats.index_entry import FORMAT

from ..common.integers import cdiv
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import BF16_MAX, INTERPRETED, UNFUSED, encode_e4m3_bytes, signed_sum
from .pool import last_slot

DIM, ENTRY_BYTES, page_bytes = FORMAT.dim, FORMAT.entry_bytes, FORMAT.page_bytes

AMAX_FLOOR = tl.constexpr(1e-4)
HADAMARD_SCALE = tl.constexpr(128**-0.5)
PARTNER_SUM_DTYPE = tl.constexpr(tl.int64 if INTERPRETED.value else tl.int32)
"""Dtype of the sum of two partners' bits; the interpreter's sum of int32 is int64, whatever dtype is asked for."""


@triton.jit
def hadamard128(rows):
    """Compute ``rows · H · 128^-0.5`` of fp32 [R, 128], H the Hadamard matrix in Sylvester order; R a power of two.

    Bit-equal to ``index_entry.hadamard``: butterflies at distances 1, 2, 4 … 64, one addition or subtraction each, then
    one product. Launch with ``UNFUSED``: otherwise a product before the first stage is fused with the stage's addition.
    """
    sign = tl.where(tl.arange(0, 2) == 1, -1.0, 1.0)[None, None, :, None]
    for stage in tl.static_range(7):
        x = tl.reshape(rows, (rows.shape[0], 64 >> stage, 2, 1 << stage))
        # An element's partner is the integer sum of the pair's bits less its own. The compiler makes one shuffle of it.
        bits = x.to(tl.int32, bitcast=True)
        partner = tl.sum(bits, axis=2, keep_dims=True, dtype=PARTNER_SUM_DTYPE) - bits
        partner = partner.to(tl.int32).to(tl.float32, bitcast=True)
        rows = tl.reshape(signed_sum(x, sign, partner), rows.shape)
    return rows * HADAMARD_SCALE


@triton.jit
def pack_index_row(rows):
    """Pack fp32 [R, 128] into (codes uint8 [R, 128], scales fp32 [R]), bit-equal to ``index_entry.pack``.

    NaN counts as +0; magnitudes are clamped to the largest finite bf16. A row's scale depends on that row alone.
    """
    # The GPU's maximum ignores NaN, and is NaN only for a row of NaN alone; the interpreter's does not ignore NaN.
    magnitudes = tl.abs(rows)
    if INTERPRETED:
        magnitudes = tl.where(rows != rows, 0.0, magnitudes)
    largest = tl.max(magnitudes, axis=1)
    # The values need no clamp: one above the clamp gets the largest code either way.
    largest = tl.minimum(tl.where(largest != largest, 0.0, largest), BF16_MAX)
    scale = tl.div_rn(tl.maximum(largest, AMAX_FLOOR), 448.0)
    return encode_e4m3_bytes(rows * tl.div_rn(1.0, scale)[:, None]), scale


@triton.jit
def store_index_row(rows, slots, valid, pages_ptr, page_stride, PAGE_SIZE: tl.constexpr):
    """Pack fp32 rows [R, 128] that are rotated already, and store those that are ``valid``.

    Args:
        rows: fp32 [R, 128].
        slots: int64 [R], inside the pool where valid.
        valid: bool [R].
        pages_ptr: uint8, at an address that is a multiple of 4.
        page_stride: bytes, a multiple of 4.
        PAGE_SIZE: keys of a page.
    """
    codes, scale = pack_index_row(rows)
    page = pages_ptr + slots // PAGE_SIZE * page_stride
    row = slots % PAGE_SIZE
    data = (page + row * 128)[:, None] + tl.arange(0, 128)[None, :]
    tl.store(data, codes, mask=valid[:, None])
    scales = (page + PAGE_SIZE * 128 + row * 4).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(scales, scale, mask=valid)


@triton.jit
def _store_kernel(
    rows, slots, pages, count, rows_row, page_stride, last_slot, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr
):
    after_previous()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    slot = tl.load(slots + row, mask=inside, other=-1).to(tl.int64)
    address = rows + row[:, None] * rows_row + tl.arange(0, 128)[None, :]
    values = tl.load(address, mask=inside[:, None], other=0.0).to(tl.float32)
    store_index_row(hadamard128(values), slot, (slot >= 0) & (slot <= last_slot), pages, page_stride, PAGE_SIZE)


def store_index_keys(rows: Tensor, slots: Tensor, pages: Tensor, page_size: int) -> None:
    """Rotate finished keys by the Hadamard matrix, pack them and store them in their slots (specification §4.5, §5).

    Args:
        rows: bf16 or fp32 [T, 128], after RoPE, the last dimension contiguous.
        slots: int32 or int64 [T], contiguous, distinct; a row whose slot is outside the pool (−1 for padding) is not
            stored.
        pages: uint8 [pages, >= page_bytes(page_size)], rows contiguous, each page at a multiple of 16 bytes; written in
            place, other bytes are left alone.
        page_size: keys of a page.

    Rounding: bit-equal to ``index_entry.hadamard`` followed by ``index_entry.pack``. Floor: T·(2·128 + 132) bytes for
    bf16 rows.

    Raises:
        OperandTypeError: a dtype is not one of the above.
        OperandValueError: a shape, stride, alignment, page size or device is not as above.
    """
    checks.require_dtype("rows", rows, torch.bfloat16, torch.float32)
    checks.require_shape("rows", rows, (rows.shape[0], DIM), "[T, 128]")
    checks.require_rows("rows", rows)
    count = rows.shape[0]
    checks.require_shape("slots", slots, (count,), "[T]")
    checks.require_dtype("slots", slots, torch.int32, torch.int64)
    checks.require_contiguous("slots", slots)
    checks.require_pages("pages", pages, page_bytes(page_size), page_size)
    checks.require_same_device("rows", rows, slots=slots, pages=pages)
    if count:
        rows_per_program = 4
        _store_kernel[(cdiv(count, rows_per_program),)](
            rows,
            slots,
            pages,
            count,
            rows.stride(0),
            pages.stride(0),
            last_slot(pages, page_size),
            page_size,
            rows_per_program,
            num_warps=1,
            **UNFUSED,
            **OVERLAPPED,
        )
