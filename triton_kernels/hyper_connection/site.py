"""Manifold-constrained hyper-connections (mHC) around a sublayer: four residual streams (DEEPSEEK_V4.md §2).

Between two sublayers three things happen to a token's streams X [4, d]: the sublayer's output h is mixed in (*post*),
24 products with the flattened result give the next site's coefficients, and the streams are collapsed into the next
sublayer's input and normalised (*pre*). :func:`hyper_connection_next` does all of it in one launch
(``hyper_connection_site``), laid on the chip by ``hyper_connection_tiling``.

The products use bf16 tensor cores without loss: X is bf16, and the fp32 weight ``fn`` is kept as the three bf16 of
which it is the sum (:func:`split_fn`), so that the kernel need not take it apart for every block of tokens.

Floor in bytes: 20·d a token (streams read and written 16·d, h read and x written 4·d), and ``fn``, 576·d, once. What is
above it goes through L2: 8·d a token, as the whole row must be known before it can be collapsed, and a program that
kept it on chip would have too few tokens to share ``fn`` among; ``fn`` again for each block; and the parts of the
products, 128 bytes a token and part.

Only four streams of bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.formats.nvfp4 import BLOCK
from nvfp4_sgl.formats.rows import Rows

from ..common import chip
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import round_for, widen
from ..quantize.rows import check_rows, rows_arguments
from .site_kernel import COLUMNS, as_fp32, mixed, site_kernel
from .tiling import choose_tiling, counters_size, workspace_size

STREAMS = 4
SITE_ROWS = (2 + STREAMS) * STREAMS
"""Rows of ``fn`` at a site: pre, post, comb."""
MAX_WIDTH = 16384
"""Largest d: a program holds a collapsed row in registers."""


@triton.jit
def _post(output, streams, post, comb, out, d, BLOCK_D: tl.constexpr):
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < d
    at = token * (4 * d) + column
    h = as_fp32(tl.load(output + token * d + column, mask=inside))
    x0 = widen(tl.load(streams + at, mask=inside))
    x1 = widen(tl.load(streams + at + d, mask=inside))
    x2 = widen(tl.load(streams + at + 2 * d, mask=inside))
    x3 = widen(tl.load(streams + at + 3 * d, mask=inside))
    for k in tl.static_range(4):
        c = comb + token * 16 + k
        weight = tl.load(post + token * 4 + k)
        y = mixed(h, x0, x1, x2, x3, weight, tl.load(c), tl.load(c + 4), tl.load(c + 8), tl.load(c + 12))
        tl.store(out + at + k * d, round_for(y, out), mask=inside)


@dataclass(frozen=True)
class Site:
    """What one mHC site, or the final collapse, computes with.

    Attributes:
        fn: bf16 [3, 24, 4 * d], what :func:`split_fn` makes of the fp32 weight; stream-major columns; rows are pre (4),
            post (4), comb (16). The final collapse has pre alone.
        base: fp32, one for each row of ``fn``.
        scale: fp32 [3], for pre, post and comb; [1] for the final collapse.
        hc_eps: added to ``pre``, to the softmax and to Sinkhorn's sums.
        norm_eps: added to the mean squares, that of all 4 * d values and RMSNorm's.
        norm: bf16 or fp32 [d], the weight of the sublayer's RMSNorm; ``None`` leaves the collapsed row as it is.
        iterations: of Sinkhorn; the final collapse has none.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    hc_eps: float
    norm_eps: float
    norm: Tensor | None = None
    iterations: int = 0

    @property
    def is_head(self) -> bool:
        return self.fn.shape[1] == STREAMS


def split_fn(fn: Tensor) -> Tensor:
    """fp32 [rows, 4 * d] → bf16 [3, rows, 4 * d], whose sum it is: each part is the nearest to what those before leave.

    Exact, as 8 + 8 + 8 significant bits are 24; what is below 2^-133, bf16's smallest number, is rounded away.
    """
    first = fn.bfloat16()
    rest = fn - first.float()
    second = rest.bfloat16()
    return torch.stack([first, second, (rest - second.float()).bfloat16()])


def new_site_semaphores(tokens: int, device: torch.device | str) -> Tensor:
    """Counters of a :class:`SiteState` of up to ``tokens`` tokens."""
    return torch.zeros(counters_size(tokens), dtype=torch.int32, device=device)


@dataclass(frozen=True)
class SiteState:
    """What passes from one site to the next, and room to work; larger ones may be used for fewer tokens.

    ``post`` and ``comb`` are of the sublayer under way. Allocate once: nothing here allocates on a step.

    Attributes:
        x: bf16 [T, d], the sublayer's input.
        post: fp32 [T, 4]. comb: fp32 [T, 4, 4].
        workspace: fp32, :func:`workspace_size` of T and d.
        counters: int32, :func:`counters_size` of T; zero between launches, which leave them so.
        quantized: [T, d], where ``x`` goes in NVFP4, too, if it is wanted so; bit-equal to :func:`quantize.quantize` of
            ``x``. d must be a multiple of 64.
    """

    x: Tensor
    post: Tensor
    comb: Tensor
    workspace: Tensor
    counters: Tensor
    quantized: Rows | None = None

    @classmethod
    def allocate(cls, tokens: int, d: int, device: torch.device | str, *, counters: Tensor | None = None) -> SiteState:
        """Room for up to ``tokens`` tokens; ``counters`` outlive it if they are given."""
        return cls(
            torch.empty(tokens, d, dtype=torch.bfloat16, device=device),
            torch.empty(tokens, STREAMS, dtype=torch.float32, device=device),
            torch.empty(tokens, STREAMS, STREAMS, dtype=torch.float32, device=device),
            torch.empty(workspace_size(tokens, d), dtype=torch.float32, device=device),
            new_site_semaphores(tokens, device) if counters is None else counters,
        )

    def first(self, tokens: int) -> SiteState:
        """The part for the first ``tokens`` tokens."""
        quantized = None if self.quantized is None else self.quantized.first(tokens)
        return replace(self, x=self.x[:tokens], post=self.post[:tokens], comb=self.comb[:tokens], quantized=quantized)


def _enter(op: str, site: Site, streams: Tensor, state: SiteState, after: tuple[Tensor, Tensor] | None) -> None:
    """Pre of a site, after post of the one before if ``after`` is given: its output, and where the next streams go."""
    _check_streams(op, streams)
    tokens, _, d = streams.shape
    _check_site(op, site, streams, state)
    if state.quantized is not None:
        check_rows(f"{op}: quantized", state.quantized, (tokens,), d, streams)
    if tokens == 0:
        return
    tiling, head = choose_tiling(tokens), site.is_head
    splits, d_per_split = tiling.splits(tokens, d)
    parts = state.workspace
    output, next_streams = after or (None, streams)
    site_kernel[(tiling.blocks(tokens) * (splits + tiling.followers(tokens, head)),)](
        streams, output, state.post, state.comb, site.fn, site.base, site.scale, site.norm, next_streams, state.x,
        () if state.quantized is None else rows_arguments(state.quantized), parts,
        parts[splits * tokens * COLUMNS.value :], state.counters, tokens, d, d_per_split, splits,
        tiling.lag(tokens, d, head), site.hc_eps, site.norm_eps,
        POST=after is not None, ROWS=site.fn.shape[1], ITERATIONS=site.iterations, NORM=site.norm is not None,
        TICKETS=tiling.tickets(tokens, head, chip.processors(streams.device)),
        EVEN=d % tiling.columns == 0, BLOCK_T=tiling.tokens, BLOCK_D=tiling.columns, STAGES=tiling.stages,
        COLLAPSED=tiling.collapsed, BALANCED=tiling.balanced, BLOCK_SPLITS=triton.next_power_of_2(splits),
        BLOCKS=max(triton.next_power_of_2(d) // BLOCK, 1), num_warps=tiling.warps, maxnreg=tiling.registers,
        **OVERLAPPED,
    )  # fmt: skip


def hyper_connection_pre(site: Site, streams: Tensor, state: SiteState) -> None:
    """Collapse the streams into a sublayer's input, normalise it, and compute how its output is mixed back.

    Args:
        site: the sublayer's; with a final collapse's, ``state.post`` and ``state.comb`` stay as they are.
        streams: bf16 [T, 4, d], contiguous.
        state: written. ``x``: ``sum_k pre_k x_k``, rounded once, then RMSNorm over the rounded values, rounded once.

    Coefficients are fp32: ``post`` within 1e-5 of exact arithmetic for mixes of ordinary size, ``comb`` within 1e-5.
    """
    _enter("hyper_connection_pre", site, streams, state, None)


def hyper_connection_next(
    site: Site, output: Tensor, streams: Tensor, state: SiteState, *, out: Tensor | None = None
) -> Tensor:
    """:func:`hyper_connection_post` of a sublayer and :func:`hyper_connection_pre` of the next (or the final collapse).

    Args:
        site: the next sublayer's.
        output: bf16 or fp32 [T, d], the sublayer's output; all ranks' sum.
        streams: bf16 [T, 4, d] as they were before the sublayer.
        state: ``post`` and ``comb`` of the sublayer are read, then all is overwritten with the next one's.
        out: the streams after the sublayer; ``streams`` itself unless given.

    Returns:
        ``out``, equal to :func:`hyper_connection_post`'s bit for bit.
    """
    op = "hyper_connection_next"
    out = streams if out is None else out
    _check_output(op, output, streams, out)
    _enter(op, site, streams, state, (output, out))
    return out


def hyper_connection_post(
    output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Mix a sublayer's output into the streams: ``x'_k = post_k h + sum_j comb[j, k] x_j``.

    ``comb`` acts transposed: its row index is the stream that is read. fp32 throughout, one rounding.

    Args:
        output: bf16 or fp32 [T, d], the sublayer's output.
        streams: bf16 [T, 4, d] as they were before the sublayer.
        post: fp32 [T, 4]. comb: fp32 [T, 4, 4].
        out: bf16 [T, 4, d]; may be ``streams`` itself; allocated unless given.
    """
    op = "hyper_connection_post"
    _check_streams(op, streams)
    tokens, _, d = streams.shape
    out = torch.empty_like(streams) if out is None else out
    _check_output(op, output, streams, out)
    _check_coefficients(op, post, comb, streams)
    if tokens:
        block = min(triton.next_power_of_2(d), 1024)
        _post[(tokens, triton.cdiv(d, block))](
            output, streams, post, comb, out, d, BLOCK_D=block, num_warps=4, **OVERLAPPED
        )
    return out


def _check_streams(op: str, streams: Tensor) -> None:
    require_dimensions(f"{op}: streams", streams, 3, "[tokens, 4, d]")
    _, count, d = streams.shape
    if count != STREAMS or not 0 < d <= MAX_WIDTH:
        raise OperandValueError(
            f"{op}: streams: expected shape [tokens, {STREAMS}, d], d at most {MAX_WIDTH}, found {tuple(streams.shape)}"
        )
    require_dtype(f"{op}: streams", streams, torch.bfloat16)
    require_contiguous(f"{op}: streams", streams)


def _check_output(op: str, output: Tensor, streams: Tensor, out: Tensor) -> None:
    tokens, _, d = streams.shape
    require_shape(f"{op}: output", output, (tokens, d), "[tokens, d]")
    require_dtype(f"{op}: output", output, torch.bfloat16, torch.float32)
    require_contiguous(f"{op}: output", output)
    require_shape(f"{op}: out", out, streams.shape, "[tokens, 4, d]")
    require_dtype(f"{op}: out", out, torch.bfloat16)
    require_contiguous(f"{op}: out", out)
    require_same_device("streams", streams, **{f"{op}: output": output, f"{op}: out": out})


def _check_coefficients(op: str, post: Tensor, comb: Tensor, streams: Tensor) -> None:
    tokens = streams.shape[0]
    require_shape(f"{op}: post", post, (tokens, STREAMS), "[tokens, 4]")
    require_shape(f"{op}: comb", comb, (tokens, STREAMS, STREAMS), "[tokens, 4, 4]")
    for name, tensor in {f"{op}: post": post, f"{op}: comb": comb}.items():
        require_dtype(name, tensor, torch.float32)
        require_contiguous(name, tensor)
        require_same_device("streams", streams, **{name: tensor})


def _check_site(op: str, site: Site, streams: Tensor, state: SiteState) -> None:
    tokens, _, d = streams.shape
    rows, scales = (STREAMS, 1) if site.is_head else (SITE_ROWS, 3)
    require_shape(f"{op}: fn", site.fn, (3, rows, STREAMS * d), "[3, 24 (4 for the final collapse), 4 * d]")
    require_shape(f"{op}: base", site.base, (rows,), "[rows of fn]")
    require_shape(f"{op}: scale", site.scale, (scales,), "[3] (1 for the final collapse)")
    if not site.is_head and site.iterations < 1:
        raise OperandValueError(f"{op}: iterations: expected at least 1, found {site.iterations}")
    require_dtype(f"{op}: fn", site.fn, torch.bfloat16)
    for name, tensor in {f"{op}: base": site.base, f"{op}: scale": site.scale}.items():
        require_dtype(name, tensor, torch.float32)
    for name, tensor in {f"{op}: fn": site.fn, f"{op}: base": site.base, f"{op}: scale": site.scale}.items():
        require_contiguous(name, tensor)
        require_same_device("streams", streams, **{name: tensor})
    if site.norm is not None:
        require_shape(f"{op}: norm", site.norm, (d,), "[d]")
        require_dtype(f"{op}: norm", site.norm, torch.bfloat16, torch.float32)
        require_contiguous(f"{op}: norm", site.norm)
    require_shape(f"{op}: x", state.x, (tokens, d), "[tokens, d]")
    require_dtype(f"{op}: x", state.x, torch.bfloat16)
    require_contiguous(f"{op}: x", state.x)
    _check_coefficients(op, state.post, state.comb, streams)
    require_same_device("streams", streams, **{f"{op}: norm": site.norm, f"{op}: x": state.x})
    _check_room(f"{op}: workspace", state.workspace, torch.float32, workspace_size(tokens, d), streams)
    _check_room(f"{op}: counters", state.counters, torch.int32, counters_size(tokens), streams)


def _check_room(name: str, room: Tensor, dtype: torch.dtype, needed: int, streams: Tensor) -> None:
    require_dtype(name, room, dtype)
    require_contiguous(name, room)
    require_same_device("streams", streams, **{name: room})
    if room.numel() < needed:
        raise OperandValueError(
            f"{name}: expected at least {needed} values for streams of shape {tuple(streams.shape)},"
            f" found {room.numel()}"
        )
