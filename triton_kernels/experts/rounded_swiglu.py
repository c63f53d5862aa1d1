"""SwiGLU between two expert GEMMs in bf16, rounded to NVFP4: what SM100's gated GEMM does in its epilogue.

The first GEMM's fp32 sums have none of their scales yet. For each routed row, all in fp32::

    gate, up = (sum · row scale of the token) · alpha of the expert's gate, up
    hidden   = silu(min(gate, limit)) · clamp(up, ±limit)
    out      = code · block scale of hidden in NVFP4, with one constant row scale, left to the next GEMM's alpha

The recipe of NVFP4 is that of :mod:`..quantize.nvfp4`; NaN becomes +0. Supports widths of a multiple of 64. Routes are
data on the device and are not checked.

Floor: 8·I bytes read and 2·I written a routed row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.formats import checks
from nvfp4_sgl.formats.nvfp4 import BLOCK, SCALE_MAX, SCALE_MIN
from nvfp4_sgl.limits import MAX_SWIGLU_LIMIT, MIN_SWIGLU_LIMIT, NVFP4_K_MULTIPLE

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import UNFUSED, finite
from ..quantize.nvfp4 import block_maxima, load_halves, quantize_blocks, store_halves
from ..quantize.rounded import decoded_halves
from .permutation import Routes
from .swiglu import clamped_swiglu

PROGRAM_BLOCKS = 64
"""Blocks of a row that a program computes at most: the row scale is constant, so none needs the whole row."""


@triton.jit
def _swiglu_to_nvfp4(
    gate_up, row_scale, alpha, experts, destination, out, limit, out_scale, width,
    COPIES: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    after_previous()
    pair = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * BLOCKS * 16
    row = tl.load(destination + pair).to(tl.int64)
    if row >= 0:
        expert = tl.load(experts + pair).to(tl.int64)
        scale = tl.load(row_scale + pair // COPIES)
        of_gate, of_up = tl.load(alpha + expert * 2), tl.load(alpha + expert * 2 + 1)
        source = gate_up + row * width * 2 + begin
        gate_first, gate_last = load_halves(source, width - begin, BLOCKS)
        up_first, up_last = load_halves(source + width, width - begin, BLOCKS)
        first = clamped_swiglu(gate_first * scale * of_gate, up_first * scale * of_up, limit)
        last = clamped_swiglu(gate_last * scale * of_gate, up_last * scale * of_up, limit)
        first, last = finite(first), finite(last)
        words, block_scale = quantize_blocks(first, last, block_maxima(first, last, BLOCKS), out_scale, BLOCKS)
        first_values, last_values = decoded_halves(words, block_scale)
        store_halves(out + row * width + begin, first_values, last_values, width - begin, BLOCKS)


def swiglu_to_nvfp4(
    gate_up: Tensor, row_scale: Tensor, alpha: Tensor, routes: Routes, limit: float, scale: float, out: Tensor
) -> Tensor:
    """Scale gate and up, compute the clamped SwiGLU and round it to NVFP4 with a constant row scale.

    Args:
        gate_up: fp32 [R, 2 I], contiguous, gate columns first, I a multiple of 64: sums of codes times block scales.
        row_scale: fp32 [T], contiguous, the row scales of the tokens.
        alpha: fp32 [G, 2], contiguous, the global scales of each group's gate and up.
        routes: the groups and rows of the tokens.
        limit: ``swiglu_limit``, 2^-10 to 2^60.
        scale: the row scale of ``out``, ``swiglu_row_scale(limit)``.
        out: bf16 [R, I], contiguous: code times block scale, without ``scale``. Rows of no pair are left as they are.

    Returns:
        ``out``.

    Rounding: fp32 with one rounding each; SwiGLU within 2e-6 of the value (exp is the device's); its codes and block
    scales are those of ``nvfp4_sgl.formats.nvfp4.quantize_rows``.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride, device, ``limit`` or ``scale`` does not fit.

    Floor: 8·I bytes read and 2·I written a routed row.
    Source: specification §6.2, §9.3.
    """
    _check(gate_up, row_scale, alpha, routes, limit, scale, out)
    width = out.shape[1]
    pairs = routes.tokens * routes.topk
    if pairs:
        blocks = min(next_power_of_2(width // BLOCK), PROGRAM_BLOCKS)
        _swiglu_to_nvfp4[(pairs, cdiv(width, blocks * BLOCK))](
            gate_up, row_scale, alpha, routes.experts, routes.destination, out, limit, scale, width,
            COPIES=routes.topk, BLOCKS=blocks, num_warps=max(1, blocks // 32), **UNFUSED, **OVERLAPPED,
        )  # fmt: skip
    return out


@checks.once
def _check(
    gate_up: Tensor, row_scale: Tensor, alpha: Tensor, routes: Routes, limit: float, scale: float, out: Tensor
) -> None:
    """Refuse what :func:`swiglu_to_nvfp4` cannot read or write; metadata only."""
    op = "swiglu_to_nvfp4"
    checks.require_dimensions(f"{op}: gate_up", gate_up, 2, "[R, 2 I]")
    checks.require_multiple(f"{op}: gate_up", "columns", gate_up.shape[1], 2 * NVFP4_K_MULTIPLE)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    checks.require_shape(f"{op}: row_scale", row_scale, (routes.tokens,), "[T]")
    checks.require_shape(f"{op}: alpha", alpha, (routes.groups, 2), "[G, gate and up]")
    checks.require_shape(f"{op}: out", out, (rows, width), "[R, I]")
    checks.require_dtype(f"{op}: out", out, torch.bfloat16)
    checks.require_contiguous(f"{op}: out", out)
    for name, tensor in {"gate_up": gate_up, "row_scale": row_scale, "alpha": alpha}.items():
        checks.require_dtype(f"{op}: {name}", tensor, torch.float32)
        checks.require_contiguous(f"{op}: {name}", tensor)
        checks.require_same_device("out", out, **{f"{op}: {name}": tensor})
    checks.require_shape(f"{op}: routes.source_row", routes.source_row, (rows,), "[R]")
    checks.require_same_device("out", out, **{f"{op}: routes.destination": routes.destination})
    routes.check(op)
    checks.require_range(f"{op}: limit", limit, MIN_SWIGLU_LIMIT, MAX_SWIGLU_LIMIT)
    checks.require_range(f"{op}: scale", scale, SCALE_MIN, SCALE_MAX)
