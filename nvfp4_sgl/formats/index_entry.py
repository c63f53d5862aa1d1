"""The lightning indexer's key entry of 132 bytes, and the rotation applied before it. Source: specification §4.5, §5.

128 × E4M3 and one fp32 scale (little endian), amax/448 and not a power of two, as SGLang 0.5.23 stores it by default.
A page of P entries (P = 64 in SGLang) is P × 128 data bytes, then P × 4 scale bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import require_dtype, require_shape, require_table
from nvfp4_sgl.formats.e4m3 import E4M3_MAX, round_to_e4m3
from nvfp4_sgl.formats.pages import RowFormat
from nvfp4_sgl.formats.values import as_finite_fp32, divide
from nvfp4_sgl.limits import INDEX_HEAD_DIM

DIM = INDEX_HEAD_DIM
SCALE_BYTES = 4
AMAX_FLOOR = 1e-4


def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 or bf16 [n, 128] → (data uint8 [n, 128] of e4m3 bytes, scale fp32 [n]).

    In fp32: NaN → +0 and magnitudes clamped to the largest finite bf16; scale = max(amax, 1e-4) / 448;
    data = e4m3(x · (1 / scale)), nearest-even, saturating (the product may round just above 448).
    Both divisions are correctly rounded. A key of zeros gets scale fp32(1e-4)/448 and codes 0; SGLang's kernels
    use the same floor, so they agree.
    """
    require_table("index keys", rows, DIM)
    require_dtype("index keys", rows, torch.float32, torch.bfloat16)
    x = as_finite_fp32(rows)
    scale = divide(x.abs().amax(dim=-1).clamp_min(AMAX_FLOOR), E4M3_MAX)
    return round_to_e4m3(x * (1.0 / scale)[:, None]).view(torch.uint8), scale


def unpack(data: Tensor, scale: Tensor) -> Tensor:
    """(data uint8 [n, 128], scale fp32 [n]) → fp32 [n, 128]: e4m3 · scale, one rounding."""
    require_table("index key data", data, DIM)
    require_dtype("index key data", data, torch.uint8)
    require_dtype("index key scale", scale, torch.float32)
    require_shape("index key scale", scale, (data.shape[0],))
    return data.contiguous().view(torch.float8_e4m3fn).float() * scale[:, None]


def _unpack_bytes(data: Tensor, scales: Tensor) -> Tensor:
    return unpack(data, scales.contiguous().view(torch.float32).flatten())


FORMAT = RowFormat(DIM, DIM, SCALE_BYTES, pack, _unpack_bytes)
page_bytes, write_rows, read_rows = FORMAT.page_bytes, FORMAT.write_rows, FORMAT.read_rows


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Hadamard transform over the last dimension of 128: x · H · 128^-0.5, H in Sylvester order; fp32.

    x is read as fp32. Seven butterfly stages at distances 1, 2, 4 … 64, each one fp32 addition or subtraction, then
    one multiplication by fp32(128^-0.5): this order defines the bits. Apply it to index queries and index keys
    alike, after RoPE and before quantisation; scores do not change, only their quantisation error does.
    """
    if x.shape[-1] != DIM:
        raise OperandValueError(f"hadamard: expected a last dimension of {DIM}, found shape {tuple(x.shape)}")
    y = x.float()
    for distance in (1, 2, 4, 8, 16, 32, 64):
        low, high = y.unflatten(-1, (-1, 2, distance)).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
    return y * DIM**-0.5
