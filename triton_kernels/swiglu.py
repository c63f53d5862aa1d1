"""Clamped SwiGLU in bf16, and the gathering of rows: what experts need around products that take bf16 (§6.2, §6.3).

Products in NVFP4 quantise on the way instead: ``quantize.quantize`` with ``source_row``, ``quantize.swiglu_quantize``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import (
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_multiple,
    require_range,
    require_rows,
    require_same_device,
    require_shape,
)
from .rounding import UNFUSED, round_for


@triton.jit
def clamped_swiglu(gate, up, limit):
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` of fp32 values; NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu(gate_up, out, limit, width, gate_up_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up + row * gate_up_row + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + column, round_for(clamped_swiglu(gate, up, limit), out), mask=inside)


def swiglu(gate_up: Tensor, limit: float, out: Tensor) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, ±limit)``.

    Args:
        gate_up: bf16 or fp32 [T, 2K], gate columns first, the last dimension contiguous.
        limit: ``swiglu_limit``, positive.
        out: bf16 or fp32 [T, K], the last dimension contiguous.

    Returns:
        ``out``.

    Rounding: fp32, within 2e-6 of the value (exp is the device's; an H200's misses 1e-6), one rounding to
    ``out``'s dtype.
    Floor: ``gate_up`` read and ``out`` written once.
    """
    op = "swiglu"
    require_dimensions(f"{op}: gate_up", gate_up, 2, "[T, 2K]")
    require_multiple(f"{op}: gate_up", "columns", gate_up.shape[1], 2)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    require_shape(f"{op}: out", out, (rows, width), "[T, K]")
    for name, tensor in {"gate_up": gate_up, "out": out}.items():
        require_dtype(f"{op}: {name}", tensor, torch.bfloat16, torch.float32)
        require_rows(f"{op}: {name}", tensor)
    require_range(f"{op}: limit", limit, 2.0**-10, 2.0**60)
    require_same_device("gate_up", gate_up, out=out)
    if rows and width:
        block = min(triton.next_power_of_2(width), 1024)
        _swiglu[(rows, triton.cdiv(width, block))](
            gate_up, out, limit, width, gate_up.stride(0), out.stride(0), BLOCK=block, num_warps=4, **UNFUSED
        )
    return out


@triton.jit
def _gather(x, source_row, out, width, x_row, out_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(source_row + row).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width) & (source >= 0)
    tl.store(out + row * out_row + column, tl.load(x + source * x_row + column, mask=inside), mask=inside)


def gather_rows(x: Tensor, source_row: Tensor, out: Tensor) -> Tensor:
    """``out[i] = x[source_row[i]]``.

    Args:
        x: [S, K], the last dimension contiguous.
        source_row: int32 [T], rows of ``x`` (not checked); a row with −1 is left as it is.
        out: [T, K] in ``x``'s dtype, the last dimension contiguous.

    Returns:
        ``out``. Floor: S·K values read at best, T·K written.
    """
    op = "gather_rows"
    require_dimensions(f"{op}: x", x, 2, "[S, K]")
    require_dimensions(f"{op}: source_row", source_row, 1, "[T]")
    require_dtype(f"{op}: source_row", source_row, torch.int32)
    require_contiguous(f"{op}: source_row", source_row)
    require_dtype(f"{op}: out", out, x.dtype)
    rows, width = source_row.shape[0], x.shape[1]
    require_shape(f"{op}: out", out, (rows, width), "[T, K]")
    require_rows(f"{op}: x", x)
    require_rows(f"{op}: out", out)
    require_same_device("x", x, source_row=source_row, out=out)
    if rows and width:
        block = min(triton.next_power_of_2(width), 2048)
        _gather[(rows, triton.cdiv(width, block))](
            x, source_row, out, width, x.stride(0), out.stride(0), BLOCK=block, num_warps=4
        )
    return out
