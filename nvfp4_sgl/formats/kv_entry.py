"""DeepSeek-V4's key-value entry of 584 bytes ("V4 layout"), for window and compressed entries alike.

Source: specification §4.4; SGLang 0.5.23's page layout ``KVLayout.V4``.

A row of 512: the first 448 (no RoPE) are E4M3 in 7 blocks of 64, each with a UE8M0 scale; the last 64 (RoPE) bf16::

    data   576 bytes: 448 × e4m3 | 64 × bf16, little endian
    scales   8 bytes: 7 × ue8m0  | one byte 0

A page of P rows is P × 576 data bytes, then P × 8 scale bytes, rounded up to a multiple of 576.
Whether the row was rounded to bf16 before it comes here is the caller's decision, to be stated there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.formats import fp8_block, ue8m0
from nvfp4_sgl.formats.checks import require_dtype, require_shape, require_table
from nvfp4_sgl.formats.e4m3 import round_to_e4m3
from nvfp4_sgl.formats.pages import RowFormat
from nvfp4_sgl.formats.values import as_finite_fp32
from nvfp4_sgl.limits import HEAD_DIM, ROPE_DIM

DIM = HEAD_DIM
NOPE_DIM = DIM - ROPE_DIM
BLOCK = 64
DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = 8


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 or bf16 [n, 512] → (data uint8 [n, 576], scales uint8 [n, 8]).

    In fp32: NaN → +0; magnitudes clamped to 1.875·2^127, in the RoPE tail to the largest finite bf16. Each 64 of
    the first 448: s = 2^ceil(log2(max(amax, 1e-4) / 448)), then e4m3(x / s), nearest-even, which cannot saturate.
    The tail is rounded to bf16, nearest-even. A row of zeros gets scale 2^-22 and codes 0.
    """
    require_table("key-value rows", rows, DIM)
    require_dtype("key-value rows", rows, torch.float32, torch.bfloat16)
    x = as_finite_fp32(rows)
    nope = x[:, :NOPE_DIM].clamp(-fp8_block.VALUE_MAX, fp8_block.VALUE_MAX).unflatten(-1, (-1, BLOCK))
    exponent = fp8_block.block_exponent(nope.abs().amax(dim=-1))
    codes = round_to_e4m3(nope * ue8m0.decode_reciprocal(exponent)[..., None]).flatten(-2).view(torch.uint8)
    tail = x[:, NOPE_DIM:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat((codes, tail), dim=-1), torch.nn.functional.pad(exponent, (0, 1))


def unpack(data: Tensor, scales: Tensor) -> Tensor:
    """(data uint8 [n, 576], scales uint8 [n, 8]) → fp32 [n, 512], exact; every value is exact in bf16 too.

    The eighth scale byte is ignored. Bytes that :func:`pack` never writes (scale 255, e4m3 NaN) come out as NaN.
    """
    require_table("key-value data", data, DATA_BYTES)
    require_dtype("key-value data", data, torch.uint8)
    require_dtype("key-value scales", scales, torch.uint8)
    require_shape("key-value scales", scales, (data.shape[0], SCALE_BYTES))
    codes = data[:, :NOPE_DIM].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, BLOCK))
    nope = (codes * ue8m0.decode(scales[:, : NOPE_DIM // BLOCK])[..., None]).flatten(-2)
    tail = data[:, NOPE_DIM:].contiguous().view(torch.bfloat16).float()
    return torch.cat((nope, tail), dim=-1)


FORMAT = RowFormat(DIM, DATA_BYTES, SCALE_BYTES, pack, unpack, align=DATA_BYTES)
page_bytes, write_rows, read_rows = FORMAT.page_bytes, FORMAT.write_rows, FORMAT.read_rows
