"""Manifold-constrained hyper-connections (mHC) around a sublayer: four residual streams (specification §2).

Between two sublayers three things happen to a token's streams X [4, d]. The sublayer's output h is mixed in (*post*). A
GEMM of the flattened result with ``fn`` gives the 24 logits of the next site's coefficients. The streams are collapsed
into the next sublayer's input and normalised (*pre*). :func:`hyper_connection_next` does all of it in one launch of
:mod:`.site_kernel`; :mod:`.tiling` divides the work among programs.

The GEMM uses bf16 tensor cores without loss: X is bf16, and the fp32 weight ``fn`` is stored as three bf16 matrices
whose sum it is (:func:`split_fn`), so that the kernel need not split it for every block of tokens.

Supports exactly four streams, in bf16, of d up to :data:`MAX_HIDDEN_SIZE`.

Floor in bytes: 20·d a token (streams read and written 16·d, h read and x written 4·d), and ``fn``, 576·d, once. The
traffic above the floor goes through L2. It is 8·d a token, because the whole row must be known before it can be
collapsed: a program that kept it on chip would share ``fn`` among too few tokens. ``fn`` is read again for each block,
and the partial sums of the GEMM take 128 bytes a token and split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import (
    once,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.formats.nvfp4 import BLOCK
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.limits import MAX_HC_EPS, MAX_HIDDEN_SIZE, MIN_HC_EPS, STREAMS

from ..common import chip
from ..common.inbox import Inbox
from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import round_for, widen
from ..quantize.rows import check_rows, rows_arguments
from .site_kernel import COLUMNS, as_fp32, mixed, site_kernel
from .tiling import choose_tiling, semaphores_size, workspace_size

SITE_ROWS = (2 + STREAMS) * STREAMS
"""Rows of ``fn`` at a site: 4 of *pre*, 4 of *post*, 16 of *comb*."""


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
    """The parameters of one mHC site, or of the final collapse.

    Attributes:
        fn: bf16 [3, 24, 4 * d], contiguous, what :func:`split_fn` makes of the fp32 weight; stream-major columns; rows
            are pre (4), post (4), comb (16). The final collapse has pre alone: [3, 4, 4 * d].
        base: fp32 [24], one for each row of ``fn``; [4] for the final collapse.
        scale: fp32 [3], for pre, post and comb; [1] for the final collapse.
        hc_eps: added to ``pre``, to the softmax and to Sinkhorn's sums; for these from :data:`limits.MIN_HC_EPS` to
            :data:`limits.MAX_HC_EPS`.
        norm_eps: added to the mean squares, that of all 4 * d values and RMSNorm's.
        norm: bf16 or fp32 [d], the weight of the sublayer's RMSNorm; ``None`` leaves the collapsed row as it is.
        iterations: iterations of Sinkhorn, at least 1; the final collapse has none.
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
        """Whether this is the final collapse, which has no *post* and *comb*."""
        return self.fn.shape[1] == STREAMS


def split_fn(fn: Tensor) -> Tensor:
    """Split an fp32 weight [rows, 4 * d] into three bf16 parts [3, rows, 4 * d] whose sum it is.

    Each part is the bf16 nearest to what the parts before leave. The split is exact, as 8 + 8 + 8 significant bits are
    24; what is below 2^-133, bf16's smallest number, is rounded away.
    """
    first = fn.bfloat16()
    rest = fn - first.float()
    second = rest.bfloat16()
    return torch.stack([first, second, (rest - second.float()).bfloat16()])


def new_site_semaphores(tokens: int, device: torch.device | str) -> Tensor:
    """Zeroed semaphores for a :class:`SiteState` of up to ``tokens`` tokens."""
    return torch.zeros(semaphores_size(tokens), dtype=torch.int32, device=device)


@dataclass(frozen=True)
class SiteState:
    """The state that passes from one site to the next, and workspace.

    ``post`` and ``comb`` belong to the sublayer that runs between the two sites. ``workspace`` and ``semaphores`` may
    be larger than needed. Allocate once: nothing here allocates on a step.

    Attributes:
        x: bf16 [T, d], contiguous, the sublayer's input.
        post: fp32 [T, 4], contiguous.
        comb: fp32 [T, 4, 4], contiguous.
        workspace: fp32, :func:`workspace_size` of T and d; contents undefined between launches.
        semaphores: int32, :func:`semaphores_size` of T: the ticket counter, then one semaphore a block of tokens. Zero
            between launches, which leave them so.
        quantized: [T, d] in NVFP4, where ``x`` is stored, too, if given; bit-equal to :func:`quantize.quantize` of
            ``x``. d must be a multiple of 64.
        planned_tokens: T or more: tilings are chosen for so many; for T unless given.
    """

    x: Tensor
    post: Tensor
    comb: Tensor
    workspace: Tensor
    semaphores: Tensor
    quantized: Rows | None = None
    planned_tokens: int | None = None

    @classmethod
    def allocate(
        cls,
        tokens: int,
        d: int,
        device: torch.device | str,
        *,
        semaphores: Tensor | None = None,
        planned_tokens: int | None = None,
    ) -> SiteState:
        """Room for up to ``tokens`` tokens of ``d`` columns, contents undefined.

        Args:
            semaphores: int32, zero, that the caller keeps, :func:`semaphores_size` or more; allocated unless given.
            planned_tokens: ``tokens`` or more; these unless given.
        """
        return cls(
            torch.empty(tokens, d, dtype=torch.bfloat16, device=device),
            torch.empty(tokens, STREAMS, dtype=torch.float32, device=device),
            torch.empty(tokens, STREAMS, STREAMS, dtype=torch.float32, device=device),
            torch.empty(workspace_size(tokens, d), dtype=torch.float32, device=device),
            new_site_semaphores(tokens, device) if semaphores is None else semaphores,
            planned_tokens=planned_tokens,
        )

    def first(self, tokens: int) -> SiteState:
        """The part for the first ``tokens`` tokens, in place; workspace and semaphores whole."""
        quantized = None if self.quantized is None else self.quantized.first(tokens)
        return replace(self, x=self.x[:tokens], post=self.post[:tokens], comb=self.comb[:tokens], quantized=quantized)


class _Launch(NamedTuple):
    """The launch of operands that look the same.

    ``parts``: values of partial sums at the beginning of the workspace; ``sizes``: arguments behind the tensors.
    """

    grid: tuple[int]
    parts: int
    sizes: tuple[int, ...]
    constants: dict[str, Any]


def _launch_site(
    op: str, site: Site, streams: Tensor, state: SiteState, after: tuple[Tensor | Inbox, Tensor] | None
) -> None:
    """Check and launch *pre* of a site, preceded by *post* of the site before if ``after`` is given.

    after: the output of the sublayer before, and where the next streams go.
    """
    launch = _bind(op, site, streams, state, after, chip.processors(streams.device))
    if launch is None:
        return
    output, next_streams = after or (None, streams)
    given = output.arguments() if isinstance(output, Inbox) else output
    site_kernel[launch.grid](
        streams, given, state.post, state.comb, site.fn, site.base, site.scale, site.norm, next_streams, state.x,
        () if state.quantized is None else rows_arguments(state.quantized), state.workspace,
        state.workspace[launch.parts :], state.semaphores, *launch.sizes, site.hc_eps, site.norm_eps,
        **launch.constants,
    )  # fmt: skip


def hyper_connection_pre(site: Site, streams: Tensor, state: SiteState) -> None:
    """Collapse the streams into a sublayer's input, normalise it, and compute *post* and *comb* of its output.

    Args:
        site: the sublayer's; with that of the final collapse, ``state.post`` and ``state.comb`` stay as they are.
        streams: bf16 [T, 4, d], contiguous, d up to 16384.
        state: written: ``x``, ``quantized`` if given, ``post`` and ``comb``.

    Rounding: ``x`` is ``sum_k pre_k x_k``, rounded once to bf16, then RMSNorm over the rounded values, rounded once.
    Coefficients are fp32: ``post`` within 1e-5 of exact arithmetic for mixes of ordinary size, ``comb`` within 1e-5.

    Raises:
        OperandTypeError: a dtype is not that of :class:`Site`, :class:`SiteState` or of ``streams`` above.
        OperandValueError: a shape, stride or device does not fit, ``iterations`` is less than 1, ``hc_eps`` is out of
            bounds, or ``state.workspace`` or ``state.semaphores`` is too small.

    Source: specification §2.
    """
    _launch_site("hyper_connection_pre", site, streams, state, None)


def hyper_connection_next(
    site: Site, output: Tensor | Inbox, streams: Tensor, state: SiteState, *, out: Tensor | None = None
) -> Tensor:
    """Do :func:`hyper_connection_post` of a sublayer and :func:`hyper_connection_pre` of the next one in one launch.

    Args:
        site: the next sublayer's, or the final collapse.
        output: bf16 or fp32 [T, d], contiguous: the sublayer's output, summed over all ranks; or where the ranks' parts
            of it come, in bf16, from the kernels before. The kernel waits for them, adds them, and empties the inbox;
            :mod:`..common.inbox` says which inbox may be used when.
        streams: bf16 [T, 4, d], contiguous, as they were before the sublayer.
        state: ``post`` and ``comb`` of the sublayer are read, then everything is overwritten with the next one's.
        out: bf16 [T, 4, d], contiguous: the streams after the sublayer; ``streams`` itself unless given.

    Returns:
        ``out``, bit-equal to that of :func:`hyper_connection_post`.

    Rounding: as in :func:`hyper_connection_post` and :func:`hyper_connection_pre`. A sum of parts is fp32, in the order
    of ranks, rounded once to bf16.

    Raises:
        OperandTypeError, OperandValueError: as :func:`hyper_connection_pre`, and where ``output`` or ``out`` does not
            fit.

    Source: specification §2.
    """
    out = streams if out is None else out
    _launch_site("hyper_connection_next", site, streams, state, (output, out))
    return out


def hyper_connection_post(
    output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """Mix a sublayer's output into the streams: ``x'_k = post_k h + sum_j comb[j, k] x_j``.

    ``comb`` acts transposed: its row index is the stream that is read.

    Args:
        output: bf16 or fp32 [T, d], contiguous, the sublayer's output.
        streams: bf16 [T, 4, d], contiguous, as they were before the sublayer.
        post: fp32 [T, 4], contiguous.
        comb: fp32 [T, 4, 4], contiguous.
        out: bf16 [T, 4, d], contiguous; may be ``streams`` itself; allocated unless given.

    Returns:
        ``out``.

    Rounding: fp32 throughout, one rounding to bf16.

    Raises:
        OperandTypeError: a dtype is not one of those above.
        OperandValueError: a shape, stride or device does not fit.

    Floor: 20·d bytes a token.
    Source: specification §2.
    """
    op = "hyper_connection_post"
    _check_streams(op, streams)
    tokens, _, d = streams.shape
    out = torch.empty_like(streams) if out is None else out
    _check_output(op, output, streams, out)
    _check_coefficients(op, post, comb, streams)
    if tokens:
        block = min(next_power_of_2(d), 1024)
        _post[(tokens, cdiv(d, block))](output, streams, post, comb, out, d, BLOCK_D=block, num_warps=4, **OVERLAPPED)
    return out


@once
def _bind(
    op: str,
    site: Site,
    streams: Tensor,
    state: SiteState,
    after: tuple[Tensor | Inbox, Tensor] | None,
    processors: int,
) -> _Launch | None:
    """Refuse what the site's kernel cannot read or write; None if there is nothing to do."""
    _check_streams(op, streams)
    if after is not None:
        _check_output(op, after[0], streams, after[1])
    _check_site(op, site, streams, state)
    if state.quantized is not None:
        check_rows(f"{op}: quantized", state.quantized, streams.shape[:1], streams.shape[2], streams)
    tokens, _, d = streams.shape
    if tokens == 0:
        return None
    planned, head = state.planned_tokens or tokens, site.is_head
    tiling = choose_tiling(planned)
    splits, d_per_split = tiling.splits(planned, d)
    constants = {
        "POST": after is not None,
        "RANKS": after[0].parts.shape[0] if after is not None and isinstance(after[0], Inbox) else 0,
        "ROWS": site.fn.shape[1], "ITERATIONS": site.iterations, "NORM": site.norm is not None,
        "TICKETS": tiling.tickets(tokens, head, processors),
        "EVEN": d % tiling.columns == 0, "BLOCK_T": tiling.tokens, "BLOCK_D": tiling.columns, "STAGES": tiling.stages,
        "COLLAPSED": tiling.collapsed, "BALANCED": tiling.balanced, "BLOCK_SPLITS": next_power_of_2(splits),
        "BLOCKS": max(next_power_of_2(d) // BLOCK, 1), "num_warps": tiling.warps, "maxnreg": tiling.registers,
        **OVERLAPPED,
    }  # fmt: skip
    return _Launch(
        (tiling.blocks(tokens) * (splits + tiling.followers(tokens, head)),),
        splits * tokens * COLUMNS.value,
        (tokens, d, d_per_split, splits, tiling.lag(tokens, d, head)),
        constants,
    )


def _check_streams(op: str, streams: Tensor) -> None:
    require_dimensions(f"{op}: streams", streams, 3, "[tokens, 4, d]")
    _, count, d = streams.shape
    if count != STREAMS or not 0 < d <= MAX_HIDDEN_SIZE:
        raise OperandValueError(
            f"{op}: streams: expected shape [tokens, {STREAMS}, d], d at most {MAX_HIDDEN_SIZE}, found"
            f" {tuple(streams.shape)}"
        )
    require_dtype(f"{op}: streams", streams, torch.bfloat16)
    require_contiguous(f"{op}: streams", streams)


def _check_output(op: str, output: Tensor | Inbox, streams: Tensor, out: Tensor) -> None:
    tokens, _, d = streams.shape
    if isinstance(output, Inbox):
        output.check(f"{op}: output", tokens, d, streams)
    else:
        require_shape(f"{op}: output", output, (tokens, d), "[tokens, d]")
        require_dtype(f"{op}: output", output, torch.bfloat16, torch.float32)
        require_contiguous(f"{op}: output", output)
        require_same_device("streams", streams, **{f"{op}: output": output})
    require_shape(f"{op}: out", out, streams.shape, "[tokens, 4, d]")
    require_dtype(f"{op}: out", out, torch.bfloat16)
    require_contiguous(f"{op}: out", out)
    require_same_device("streams", streams, **{f"{op}: out": out})


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
    if not site.is_head and not MIN_HC_EPS <= site.hc_eps <= MAX_HC_EPS:
        raise OperandValueError(f"{op}: hc_eps: expected {MIN_HC_EPS:g} to {MAX_HC_EPS:g}, found {site.hc_eps:g}")
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
    _check_room(f"{op}: semaphores", state.semaphores, torch.int32, semaphores_size(tokens), streams)


def _check_room(name: str, room: Tensor, dtype: torch.dtype, needed: int, streams: Tensor) -> None:
    require_dtype(name, room, dtype)
    require_contiguous(name, room)
    require_same_device("streams", streams, **{name: room})
    if room.numel() < needed:
        raise OperandValueError(
            f"{name}: expected at least {needed} values for streams of shape {tuple(streams.shape)},"
            f" found {room.numel()}"
        )
