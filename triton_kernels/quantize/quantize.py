"""Activations to NVFP4, alone and fused with the op before.

The recipe is that of ``nvfp4.py``, bit for bit. Every op takes the same outputs for a matrix [T, K], K a multiple of
64:

* ``codes`` uint8 [T, K/2], or [T, G, K/2] where rows have groups; the even k in the low nibble;
* ``block_scales`` uint8 or float8_e4m3fn, flat, ``nvfp4.block_scale_bytes`` long: the layout that a product of
  ``token_tile`` reads; rows with groups are one matrix [T, G·K];
* ``row_scale``: fp32 [T] or [T, G] to be written, or a number, the constant for all rows.

Nothing is allocated and no grid depends on a tensor's data. Scales that pad the last atoms are left alone: they are
multiplied into rows of the product that nobody keeps.

Each docstring gives the floor in bytes. On an H200 (2026-11-21, 8192 rows) they reach 53 to 76 % of it, rows for
experts 25 to 39 %: by the compiled code, encoding takes some 17 instructions an element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import checks
from ..common.checks import OperandTypeError
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rope import mean_square_scale, require_norm_weight, require_turns, rotate
from ..common.rounding import UNFUSED, round_for, round_to_bf16
from .nvfp4 import (
    BLOCK,
    TOKEN_TILES,
    block_scale_bytes,
    join_pairs,
    layout_tile,
    load_halves,
    quantize_row,
    split_pairs,
    store_codes_and_scales,
    store_halves,
    store_quantized_row,
)

K_MULTIPLE = 64
"""Of K: whole groups of four block scales."""

CODES_ALIGNMENT = 4
"""Bytes: codes are stored eight at a time."""

BLOCKS_A_THREAD = {"quantize": 2, "rms_norm_quantize": 2, "swiglu_quantize": 1, "inverse_rope_quantize": 2}
"""Blocks of a row that each thread quantises, where there are rows enough to fill the device.

Measured on an H200 at 8192 rows, 2026-11-21, us with 1, 2 and 4: quantize of 4096 columns 30.2, 27.2, 27.3 and of 7168
62.0, 52.4, 49.3; rms_norm_quantize of 4096 49.2, 47.8, 56.9; swiglu_quantize to 2048 28.1, 27.9; inverse_rope_quantize
of 64 heads 263, 242."""

MANY_ROWS = 512

CONSTANT_SCALE_MIN, CONSTANT_SCALE_MAX = 2.0**-117, 2.0**116
"""Within these no step of the recipe is subnormal and no value infinite."""


@triton.jit
def _quantize_kernel(
    x,
    source_row,
    codes,
    block_scales,
    row_scale,
    constant,
    blocks,
    groups,
    x_row,
    x_group,
    codes_row,
    codes_group,
    GATHER: tl.constexpr,
    CONSTANT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    source = row
    if GATHER:
        source = tl.load(source_row + row).to(tl.int64)
    if source >= 0:
        first, last = load_halves(x + source * x_row + group.to(tl.int64) * x_group, blocks * 16, BLOCKS)
        store_quantized_row(
            first,
            last,
            constant,
            codes + row * codes_row + group.to(tl.int64) * codes_group,
            block_scales,
            row_scale + row * groups + group,
            row,
            group * blocks,
            blocks,
            groups * blocks,
            CONSTANT,
            TILE,
            BLOCKS,
        )


@triton.jit
def _quantize_scattered_kernel(
    x,
    destination,
    codes,
    block_scales,
    row_scale,
    constant,
    blocks,
    x_row,
    codes_row,
    COPIES: tl.constexpr,
    CONSTANT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    after_previous()
    source = tl.program_id(0).to(tl.int64)
    first, last = load_halves(x + source * x_row, blocks * 16, BLOCKS)
    words, scale, g = quantize_row(first, last, constant, CONSTANT, BLOCKS)
    for copy in range(COPIES):
        row = tl.load(destination + source * COPIES + copy).to(tl.int64)
        if row >= 0:
            if not CONSTANT:
                tl.store(row_scale + row, g)
            store_codes_and_scales(
                words, scale, codes + row * codes_row, block_scales, row, 0, blocks, blocks, TILE, BLOCKS
            )


def quantize(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    row_scale: Tensor | float,
    *,
    token_tile: int = 128,
    source_row: Tensor | None = None,
) -> None:
    """Quantise rows, each with a scale of its own or all with a constant one.

    Args:
        x: bf16 or fp32 [S, K] or [S, G, K], the last dimension contiguous.
        codes, block_scales, row_scale, token_tile: see the module; T = S without ``source_row``.
        source_row: int32 [T], for each row of the outputs the row of ``x`` it is made of (experts' permutations);
            of a row with −1 nothing is written. Other values must be rows of ``x``; that is not checked.

    Floor: 2·T·K bytes read (bf16; with ``source_row`` S·K at best), T·K/2 + T·K/16 written.
    """
    checks.require_dtype("x", x, torch.bfloat16, torch.float32)
    grouped = _with_groups("x", x)
    rows = x.shape[0]
    if source_row is not None:
        checks.require_dimensions("source_row", source_row, 1, "[T]")
        checks.require_dtype("source_row", source_row, torch.int32)
        checks.require_contiguous("source_row", source_row)
        rows = source_row.shape[0]
    groups, k = grouped.shape[1:]
    leading = (rows, groups) if x.dim() == 3 else (rows,)
    scale, constant = check_outputs(x, leading, k, codes, block_scales, row_scale, token_tile)
    checks.require_same_device("x", x, source_row=source_row)
    if rows and groups:
        code_groups = _with_groups("codes", codes)
        blocks = triton.next_power_of_2(k // BLOCK)
        _quantize_kernel[(rows, groups)](
            x,
            codes if source_row is None else source_row,
            codes,
            block_scales.view(torch.uint8),
            scale,
            constant,
            k // BLOCK,
            groups,
            *grouped.stride()[:2],
            *code_groups.stride()[:2],
            source_row is not None,
            isinstance(row_scale, float),
            layout_tile(token_tile),
            blocks,
            num_warps=_warps("quantize", blocks, rows * groups),
            **OVERLAPPED,
        )


def quantize_scattered(
    x: Tensor,
    destination: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    row_scale: Tensor | float,
    *,
    token_tile: int = 128,
) -> None:
    """Quantise rows, each once, and store each wherever it is wanted: tokens in the rows of their experts.

    Args:
        x: bf16 or fp32 [S, K], the last dimension contiguous.
        destination: int32 [S, k], the rows of the outputs that are made of each row of ``x``, as
            ``permutation.Routes`` has them; −1 for none. Others must be rows of the outputs, and no two alike; that
            is not checked.
        codes, block_scales, row_scale, token_tile: see the module; T is taken from ``codes``. Rows that nothing is
            made of are left alone.

    Bit-equal to :func:`quantize` with the ``source_row`` of the same permutation, which reads and rounds a row as often
    as it is wanted. Floor: 2·S·K bytes read (bf16), S·k·(K/2 + K/16) written.
    """
    checks.require_dtype("x", x, torch.bfloat16, torch.float32)
    checks.require_dimensions("x", x, 2, "[S, K]")
    checks.require_rows("x", x)
    sources, k = x.shape
    checks.require_dimensions("destination", destination, 2, "[S, k]")
    checks.require_shape("destination", destination, (sources, destination.shape[1]), "[S, k]")
    checks.require_dtype("destination", destination, torch.int32)
    checks.require_contiguous("destination", destination)
    checks.require_dimensions("codes", codes, 2, "[T, K/2]")
    scale, constant = check_outputs(x, (codes.shape[0],), k, codes, block_scales, row_scale, token_tile)
    checks.require_same_device("x", x, destination=destination)
    if sources and destination.shape[1]:
        blocks = triton.next_power_of_2(k // BLOCK)
        _quantize_scattered_kernel[(sources,)](
            x,
            destination,
            codes,
            block_scales.view(torch.uint8),
            scale,
            constant,
            k // BLOCK,
            x.stride(0),
            codes.stride(0),
            destination.shape[1],
            isinstance(row_scale, float),
            layout_tile(token_tile),
            blocks,
            num_warps=_warps("quantize", blocks, sources),
            **OVERLAPPED,
        )


@triton.jit
def _rms_norm_quantize_kernel(
    x,
    weight,
    normed,
    codes,
    block_scales,
    row_scale,
    constant,
    eps,
    blocks,
    x_row,
    normed_row,
    codes_row,
    KEEP: tl.constexpr,
    CONSTANT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    k = blocks * 16
    first, last = load_halves(x + row * x_row, k, BLOCKS)
    squares = tl.sum(tl.sum(first * first + last * last, axis=1), axis=0)
    scale = mean_square_scale(squares, k.to(tl.float32), eps)
    first_weight, last_weight = load_halves(weight, k, BLOCKS)
    first = round_to_bf16(first * scale * first_weight)
    last = round_to_bf16(last * scale * last_weight)
    if KEEP:
        store_halves(normed + row * normed_row, first.to(tl.bfloat16), last.to(tl.bfloat16), k, BLOCKS)
    store_quantized_row(
        first,
        last,
        constant,
        codes + row * codes_row,
        block_scales,
        row_scale + row,
        row,
        0,
        blocks,
        blocks,
        CONSTANT,
        TILE,
        BLOCKS,
    )


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    codes: Tensor,
    block_scales: Tensor,
    row_scale: Tensor | float,
    *,
    normed: Tensor | None = None,
    token_tile: int = 128,
) -> None:
    """Root-mean-square normalisation, rounded to bf16, then quantised.

    Args:
        x: bf16 or fp32 [T, K], the last dimension contiguous.
        weight: bf16 or fp32 [K].
        eps: added to the mean square.
        codes, block_scales, row_scale, token_tile: see the module.
        normed: bf16 [T, K], the last dimension contiguous: what was quantised, for consumers in bf16; may be ``x``.

    Rounding: statistics and product in fp32 (the sum of squares in an order of its own, the same for every T), one
    rounding to bf16; from there bit-equal to :func:`quantize`.
    Floor: 2·T·K bytes read, T·K/2 + T·K/16 and, where kept, 2·T·K written.
    """
    checks.require_dtype("x", x, torch.bfloat16, torch.float32)
    checks.require_dimensions("x", x, 2, "[T, K]")
    checks.require_rows("x", x)
    rows, k = x.shape
    require_norm_weight(weight, k)
    if normed is not None:
        _check_kept("normed", normed, x.shape)
    scale, constant = check_outputs(x, (rows,), k, codes, block_scales, row_scale, token_tile)
    checks.require_same_device("x", x, weight=weight, normed=normed)
    if rows:
        blocks = triton.next_power_of_2(k // BLOCK)
        _rms_norm_quantize_kernel[(rows,)](
            x,
            weight,
            codes if normed is None else normed,
            codes,
            block_scales.view(torch.uint8),
            scale,
            constant,
            eps,
            k // BLOCK,
            x.stride(0),
            0 if normed is None else normed.stride(0),
            codes.stride(0),
            normed is not None,
            isinstance(row_scale, float),
            layout_tile(token_tile),
            blocks,
            num_warps=_warps("rms_norm_quantize", blocks),  # the same for every T: the order of a sum hangs on it
            **UNFUSED,
            **OVERLAPPED,
        )


@triton.jit
def _swiglu(gate, up, limit):
    after_previous()
    # Comparisons, not minimum and maximum: a NaN must stay one until the quantiser makes it 0.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu_quantize_kernel(
    gate_up,
    hidden,
    codes,
    block_scales,
    row_scale,
    constant,
    limit,
    blocks,
    gate_up_row,
    hidden_row,
    codes_row,
    KEEP: tl.constexpr,
    CONSTANT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    k = blocks * 16
    first, last = load_halves(gate_up + row * gate_up_row, k, BLOCKS)
    first_up, last_up = load_halves(gate_up + row * gate_up_row + k, k, BLOCKS)
    first, last = _swiglu(first, first_up, limit), _swiglu(last, last_up, limit)
    if KEEP:
        store_halves(hidden + row * hidden_row, round_for(first, hidden), round_for(last, hidden), k, BLOCKS)
    store_quantized_row(
        first,
        last,
        constant,
        codes + row * codes_row,
        block_scales,
        row_scale + row,
        row,
        0,
        blocks,
        blocks,
        CONSTANT,
        TILE,
        BLOCKS,
    )


def swiglu_quantize(
    gate_up: Tensor,
    limit: float,
    codes: Tensor,
    block_scales: Tensor,
    row_scale: Tensor | float,
    *,
    hidden: Tensor | None = None,
    token_tile: int = 128,
) -> None:
    """``silu(min(gate, limit)) * clamp(up, ±limit)``, quantised from fp32.

    Args:
        gate_up: bf16 or fp32 [T, 2K], gate columns first, the last dimension contiguous.
        limit: ``swiglu_limit``, positive.
        codes, block_scales, row_scale, token_tile: see the module. The constant that the clamp makes impossible to
            exceed is fp32(limit²/2688).
        hidden: bf16 [T, K], the last dimension contiguous: the values rounded to bf16, for a product in bf16.

    Rounding: everything in fp32; silu as ``gate / (1 + exp(-gate))``, within 2e-6 of its value (exp and
    the division are the device's).
    The codes are those of the values so computed: with another exp a value next to a tie may round the other way.
    Floor: 4·T·K bytes read (bf16), T·K/2 + T·K/16 and, where kept, 2·T·K written.
    """
    checks.require_dtype("gate_up", gate_up, torch.bfloat16, torch.float32)
    checks.require_dimensions("gate_up", gate_up, 2, "[T, 2K]")
    checks.require_rows("gate_up", gate_up)
    checks.require_multiple("gate_up", "2K", gate_up.shape[1], 2 * K_MULTIPLE)
    checks.require_range("limit", limit, 2.0**-10, 2.0**60)
    rows, k = gate_up.shape[0], gate_up.shape[1] // 2
    if hidden is not None:
        _check_kept("hidden", hidden, torch.Size((rows, k)))
    scale, constant = check_outputs(gate_up, (rows,), k, codes, block_scales, row_scale, token_tile)
    checks.require_same_device("gate_up", gate_up, hidden=hidden)
    if rows:
        blocks = triton.next_power_of_2(k // BLOCK)
        _swiglu_quantize_kernel[(rows,)](
            gate_up,
            codes if hidden is None else hidden,
            codes,
            block_scales.view(torch.uint8),
            scale,
            constant,
            limit,
            k // BLOCK,
            gate_up.stride(0),
            0 if hidden is None else hidden.stride(0),
            codes.stride(0),
            hidden is not None,
            isinstance(row_scale, float),
            layout_tile(token_tile),
            blocks,
            num_warps=_warps("swiglu_quantize", blocks, rows),
            **UNFUSED,
            **OVERLAPPED,
        )


@triton.jit
def _turned_back(half, turns, rotates, x, BLOCKS: tl.constexpr):
    """A half of blocks with the pairs of those that rotate turned back; ``turns`` fp32 [BLOCKS, 8], by pair."""
    even, odd = split_pairs(half, BLOCKS)
    cos, sin = split_pairs(turns, BLOCKS)
    even, odd = rotate(even, odd, cos, -sin)
    return tl.where(rotates, round_for(join_pairs(even, odd, BLOCKS), x).to(tl.float32), half)


@triton.jit
def _inverse_rope_quantize_kernel(
    x,
    turns,
    codes,
    block_scales,
    row_scale,
    constant,
    blocks,
    groups,
    x_row,
    codes_row,
    codes_group,
    HEAD_BLOCKS: tl.constexpr,
    ROPE_BLOCKS: tl.constexpr,
    CONSTANT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    first, last = load_halves(x + row * x_row + group * blocks * 16, blocks * 16, BLOCKS)

    # Of each block its place among the blocks that rotate; negative in front of them.
    place = (tl.arange(0, BLOCKS) % HEAD_BLOCKS - (HEAD_BLOCKS - ROPE_BLOCKS))[:, None]
    turn = turns + row * (ROPE_BLOCKS * 16) + place * 16 + tl.arange(0, 8)[None, :]
    rotates = place >= 0
    first = _turned_back(first, tl.load(turn, mask=rotates, other=0.0), rotates, x, BLOCKS)
    last = _turned_back(last, tl.load(turn + 8, mask=rotates, other=0.0), rotates, x, BLOCKS)
    store_quantized_row(
        first,
        last,
        constant,
        codes + row * codes_row + group.to(tl.int64) * codes_group,
        block_scales,
        row_scale + row * groups + group,
        row,
        group * blocks,
        blocks,
        groups * blocks,
        CONSTANT,
        TILE,
        BLOCKS,
    )


def inverse_rope_quantize(
    x: Tensor,
    turns: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    row_scale: Tensor | float,
    *,
    token_tile: int = 128,
) -> None:
    """The attention output turned back by its position and quantised per (token, group of heads).

    Args:
        x: bf16 or fp32 [T, H, n], the heads of a token contiguous; n a multiple of 16. Left as it is.
        turns: fp32 [T, rope_dim] from ``rope.rope_turns``, rope_dim a multiple of 16.
        codes: uint8 [T, G, H·n/G/2]; G, which must divide H, is taken from here. Others: see the module, with groups.

    Rounding: fp32 rotation of the last rope_dim dimensions, one rounding to ``x``'s dtype; from there bit-equal to
    :func:`quantize`. Floor: 2·T·H·n bytes read, T·H·n/2 + T·H·n/16 written.
    """
    checks.require_dtype("x", x, torch.bfloat16, torch.float32)
    checks.require_dimensions("x", x, 3, "[T, H, n]")
    rows, heads, width = x.shape
    if rows:
        checks.require_contiguous("a token of x", x[0])
    checks.require_multiple("x", "n", width, BLOCK)
    rope = require_turns("turns", turns, rows, width)
    checks.require_multiple("turns", "rope_dim", rope, BLOCK)
    checks.require_dimensions("codes", codes, 3, "[T, G, K/2]")
    groups = codes.shape[1]
    checks.require_multiple("x", "H", heads, groups)
    k = heads // groups * width
    scale, constant = check_outputs(x, (rows, groups), k, codes, block_scales, row_scale, token_tile)
    checks.require_same_device("x", x, turns=turns)
    if rows:
        blocks = triton.next_power_of_2(k // BLOCK)
        _inverse_rope_quantize_kernel[(rows, groups)](
            x,
            turns,
            codes,
            block_scales.view(torch.uint8),
            scale,
            constant,
            k // BLOCK,
            groups,
            x.stride(0),
            *codes.stride()[:2],
            width // BLOCK,
            rope // BLOCK,
            isinstance(row_scale, float),
            layout_tile(token_tile),
            blocks,
            num_warps=_warps("inverse_rope_quantize", blocks, rows * groups),
            **UNFUSED,
            **OVERLAPPED,
        )


def _with_groups(name: str, tensor: Tensor) -> Tensor:
    """[rows, n] or [rows, groups, n] as the latter."""
    if tensor.dim() not in (2, 3):
        raise checks.OperandValueError(
            f"{name}: expected shape [rows, n] or [rows, groups, n], found {tuple(tensor.shape)}"
        )
    checks.require_rows(name, tensor)
    return tensor[:, None] if tensor.dim() == 2 else tensor


def _check_kept(name: str, kept: Tensor, shape: torch.Size) -> None:
    checks.require_shape(name, kept, shape, "[T, K]")
    checks.require_dtype(name, kept, torch.bfloat16)
    checks.require_rows(name, kept)


def check_outputs(
    x: Tensor,
    leading: tuple[int, ...],
    k: int,
    codes: Tensor,
    block_scales: Tensor,
    row_scale: Tensor | float,
    token_tile: int,
) -> tuple[Tensor, float]:
    """(tensor that takes row scales, constant): of the two, the one that is not in use is a placeholder."""
    checks.require_one_of("token_tile", token_tile, TOKEN_TILES)
    checks.require_multiple("x", "K", k, K_MULTIPLE)
    checks.require_dtype("codes", codes, torch.uint8)
    checks.require_shape("codes", codes, (*leading, k // 2), "[T, K/2]" if len(leading) == 1 else "[T, G, K/2]")
    checks.require_rows("codes", codes)
    checks.require_strides("codes", codes, CODES_ALIGNMENT)
    checks.require_dtype("block_scales", block_scales, torch.uint8, torch.float8_e4m3fn)
    groups = leading[1] if len(leading) == 2 else 1
    expected = block_scale_bytes(leading[0], groups * k, token_tile)
    checks.require_shape("block_scales", block_scales, (expected,), f"block scales of token tile {token_tile}")
    checks.require_contiguous("block_scales", block_scales)
    checks.require_same_device("x", x, codes=codes, block_scales=block_scales)
    if isinstance(row_scale, Tensor):
        checks.require_dtype("row_scale", row_scale, torch.float32)
        checks.require_shape("row_scale", row_scale, leading, "[T]" if len(leading) == 1 else "[T, G]")
        checks.require_contiguous("row_scale", row_scale)
        checks.require_same_device("x", x, row_scale=row_scale)
        return row_scale, 0.0
    if not isinstance(row_scale, float):
        raise OperandTypeError(f"row_scale: expected a tensor or a float, found {type(row_scale).__name__}")
    checks.require_range("row_scale", row_scale, CONSTANT_SCALE_MIN, CONSTANT_SCALE_MAX)
    return codes, row_scale


def _warps(op: str, blocks: int, rows: int = MANY_ROWS) -> int:
    """Warps for a row. More blocks a thread spread what it does once, but a row alone is done later."""
    each = BLOCKS_A_THREAD[op] if rows >= MANY_ROWS else 1
    return max(1, min(16, blocks // (32 * each)))
