"""Clamped SwiGLU and copies of rows for expert GEMMs that take bf16 (specification §6.2, §6.3).

:func:`swiglu` computes ``silu(min(gate, limit)) * clamp(up, ±limit)`` in fp32; :func:`scatter_rows` copies each token's
row to the rows of its experts. Both take bf16 or fp32 in memory. Neither quantises and neither applies routing weights.
NVFP4 activations need neither: ``quantize.scatter`` quantises rows while it copies them, and the gated GEMM's epilogue
has SwiGLU.

Floors: :func:`swiglu` reads ``gate_up`` and writes ``out`` once; :func:`scatter_rows` reads T·K values and writes
T·k·K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats.checks import (
    once,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_multiple,
    require_range,
    require_rows,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.limits import MAX_SWIGLU_LIMIT, MIN_SWIGLU_LIMIT

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import UNFUSED, round_for


@triton.jit
def clamped_swiglu(gate, up, limit):
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` of fp32 values; NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu(gate_up, out, limit, width, gate_up_row, out_row, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = gate_up + row * gate_up_row + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + column, round_for(clamped_swiglu(gate, up, limit), out), mask=inside)


def swiglu(gate_up: Tensor, limit: float, out: Tensor) -> Tensor:
    """Compute the clamped SwiGLU, ``silu(min(gate, limit)) * clamp(up, ±limit)``; NaN stays NaN.

    Args:
        gate_up: bf16 or fp32 [T, 2K], gate columns first, the last dimension contiguous.
        limit: ``swiglu_limit``, 2^-10 to 2^60.
        out: bf16 or fp32 [T, K], the last dimension contiguous.

    Returns:
        ``out``.

    Rounding: fp32, within 2e-6 of the value (exp is the device's; an H200's misses 1e-6), one rounding to
    ``out``'s dtype.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride, device or ``limit`` does not fit.

    Floor: ``gate_up`` read and ``out`` written once.
    Source: specification §6.2.
    """
    _check_swiglu(gate_up, limit, out)
    rows, width = out.shape
    if rows and width:
        block = min(next_power_of_2(width), 1024)
        _swiglu[(rows, cdiv(width, block))](
            gate_up, out, limit, width, gate_up.stride(0), out.stride(0), BLOCK=block, num_warps=4,
            **UNFUSED, **OVERLAPPED,
        )  # fmt: skip
    return out


@triton.jit
def _scatter(x, destination, out, width, x_row, out_row, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + token * x_row + column, mask=inside)
    for copy in tl.static_range(COPIES):
        row = tl.load(destination + token * COPIES + copy).to(tl.int64)
        tl.store(out + row * out_row + column, value, mask=inside & (row >= 0))


def scatter_rows(x: Tensor, destination: Tensor, out: Tensor) -> Tensor:
    """Copy each token's row to the rows that its experts read: ``out[destination[t, k]] = x[t]``.

    A row is read once and written k times. Gathering by the rows of ``out`` would read it once for each expert, and
    from memory if the input is larger than L2.

    Args:
        x: [T, K], the last dimension contiguous.
        destination: int32 [T, k], contiguous, rows of ``out`` (not checked), all different; −1 for no copy.
        out: [R, K] in ``x``'s dtype, the last dimension contiguous; rows that no token is copied to are left as they
            are.

    Returns:
        ``out``.

    Raises:
        OperandTypeError: ``destination`` is not int32, or ``out`` has another dtype than ``x``.
        OperandValueError: a shape, stride or device does not fit.

    Floor: T·K values read, T·k·K written.
    """
    _check_scatter(x, destination, out)
    (tokens, width), copies = x.shape, destination.shape[1]
    if tokens and width and copies:
        block = min(next_power_of_2(width), 1024)
        _scatter[(tokens, cdiv(width, block))](
            x, destination, out, width, x.stride(0), out.stride(0), COPIES=copies, BLOCK=block, num_warps=4,
            **OVERLAPPED,
        )  # fmt: skip
    return out


@once
def _check_swiglu(gate_up: Tensor, limit: float, out: Tensor) -> None:
    """Refuse what :func:`swiglu` cannot read or write; metadata only."""
    op = "swiglu"
    require_dimensions(f"{op}: gate_up", gate_up, 2, "[T, 2K]")
    require_multiple(f"{op}: gate_up", "columns", gate_up.shape[1], 2)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    require_shape(f"{op}: out", out, (rows, width), "[T, K]")
    for name, tensor in {"gate_up": gate_up, "out": out}.items():
        require_dtype(f"{op}: {name}", tensor, torch.bfloat16, torch.float32)
        require_rows(f"{op}: {name}", tensor)
    require_range(f"{op}: limit", limit, MIN_SWIGLU_LIMIT, MAX_SWIGLU_LIMIT)
    require_same_device("gate_up", gate_up, out=out)


@once
def _check_scatter(x: Tensor, destination: Tensor, out: Tensor) -> None:
    """Refuse what :func:`scatter_rows` cannot read or write; metadata only."""
    op = "scatter_rows"
    require_dimensions(f"{op}: x", x, 2, "[T, K]")
    tokens, width = x.shape
    require_dimensions(f"{op}: destination", destination, 2, "[T, k]")
    copies = destination.shape[1]
    require_shape(f"{op}: destination", destination, (tokens, copies), "[T, k]")
    require_dtype(f"{op}: destination", destination, torch.int32)
    require_contiguous(f"{op}: destination", destination)
    require_dimensions(f"{op}: out", out, 2, "[R, K]")
    require_shape(f"{op}: out", out, (out.shape[0], width), "[R, K]")
    require_dtype(f"{op}: out", out, x.dtype)
    require_rows(f"{op}: x", x)
    require_rows(f"{op}: out", out)
    require_same_device("x", x, destination=destination, out=out)
