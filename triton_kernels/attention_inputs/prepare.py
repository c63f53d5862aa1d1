"""All that an attention layer makes of its first product: what its queries begin with, and its caches.

The latents, the rows of the compressor and those of the indexer's are columns of one product, and what becomes of one
does not depend on another (DEEPSEEK_V4.md §3.1, §4): they are written to buffers of their own, and each program does
one part of the work. In decode and small passes one launch has them all; programs that may have a window to close come
first, since they take longest. A large prefill takes two launches, since latents pay there for the compressors' warps
and registers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from nvfp4_sgl.formats import checks

from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import UNFUSED
from ..plan.batch import Batch
from .compress_csa import compress_csa
from .compress_hca import BLOCKS, compress_hca
from .compressor import Compression, Workspace
from .index_weights import IndexWeights, project_index_weights
from .latent import Latents, store_latent
from .windows import PassArguments, unit_limit

PROGRAMS = 16
"""Of each block of channels of ratio 128 in decode, before they take several tokens: 256 in all, two a processor."""
APART = 2048
"""Tokens of a prefill from which latents and compressors are launched apart. On an H200, 2026-11-22: a CSA layer's
8192 tokens take 69 us so (59 with ``WARPS_LARGE``), in one launch 99; an HCA layer's 42 and 60; but 1024 tokens 14 and
12, 10 and 7."""
WARPS = {0: 4, 4: 8, 128: 8}
"""Of a program, by ratio; 0: latents alone."""
REGISTERS = {0: None, 4: 80, 128: None}
"""Of a thread at most, by ratio. At ratio 4 the compiler would take 107: two programs rather than three would fit a
multiprocessor of Hopper."""
WARPS_LARGE = {0: 4, 4: 4, 128: 8}
"""The same from ``APART`` tokens on. Of ratio 4 only for rows of fp32, whose sums have the same order with four warps
and eight (:func:`.windows.pool`); at ratio 128 it goes by the number of warps."""
REGISTERS_LARGE = {0: None, 4: 128, 128: None}


@triton.jit(do_not_specialize=["groups"])
def _attention_inputs(
    batch,
    latents,
    calls,
    workspace,
    index_weights,
    groups,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """``groups`` programs for each compressor of ratio 4, or each block of channels of ratio 128; then those of the
    index weights; then the latents'.

    calls: none, one, or two of ratio 4. latents, index_weights: or nothing. workspace: for ratio 128. TOKENS: of a
    program in decode; else 0, and PADDED requests or fewer.
    """
    after_previous()
    PARTS: tl.constexpr = BLOCKS if RATIO == 128 else len(calls)
    program = tl.program_id(0)
    part, number = program // groups, program % groups
    if RATIO == 128:
        if part < PARTS:
            compress_hca(number, part, batch, calls[0], workspace, TOKENS, PADDED)
    else:
        for i in tl.static_range(PARTS):
            if part == i:
                compress_csa(number, batch, calls[i], TOKENS, PADDED)
    rest = program - groups * PARTS
    if len(index_weights) > 0:
        if rest >= 0 and rest < index_weights.programs:
            project_index_weights(rest, index_weights)
        rest -= index_weights.programs
    if len(latents) > 0:  # noqa: SIM102  the first is decided when the kernel is compiled
        if rest >= 0:
            store_latent((rest // 2).to(tl.int64), rest % 2, latents)


def prepare_attention(
    latents: Latents | None,
    calls: Sequence[Compression],
    batch: Batch,
    frequencies: Tensor,
    *,
    workspace: Workspace | None = None,
    index_weights: IndexWeights | None = None,
) -> None:
    """Store the latents of a pass, close its windows, store their entries and bring the states up to date.

    One launch; two from ``APART`` tokens on, if there are latents and compressors and the pass is not decode's.

    Args:
        latents: ``None`` leaves them out.
        calls: none for a window-only layer, that of an HCA layer, the two of a CSA layer.
        batch: where the pass's tokens stand. Rows of padding (request slot 0, position 0, full slot 0) end in the state
            rows of page 0 and request 0. A slot or state row outside its buffer is left out.
        frequencies: fp32 [32], the compressed layers' RoPE frequencies.
        workspace: for ratio 128, from :func:`~.compressor.new_workspace`.
        index_weights: a product of few tokens that joins the launch; of CSA layers.

    The window's angle is ``fp32(position) * frequency``, one fp32 product, of its first token's position.

    Rounding: q_lora as of :func:`streams.rms_norm`, and quantised from bf16; keys as of
    :func:`kv_entry.norm_rope_store_kv`. The state equals that of ``ops.compress_windows`` bit for bit. Entries are fp32
    up to their format's own rounding. The pooling's exponential and sums have an error and an order of their own:
    (R + 16) · 2^-23 of the largest pooled value at most, of a window of R rows; so next to a tie a code may differ from
    the reference's by one. How its tokens are dealt to passes does not change an entry's bytes, as long as the state
    holds them exactly. It may change a latent's: their sums of squares have an order that goes by the number of warps,
    which is another from ``APART`` tokens on in layers with compressors.

    Floor: every column of the product read once, what is kept written once; per closing window the cached rows it
    needs.
    """
    op = "prepare_attention"
    batch.check(op)
    for call in calls:
        call.check(batch, frequencies)
    ratio = calls[0].compressor.ratio if calls else 0
    if [call.compressor.ratio for call in calls] not in ([], [4], [4, 4], [128]):
        raise OperandValueError(
            f"{op}: calls: expected none, one, or two of ratio 4, found {[call.compressor.ratio for call in calls]}"
        )
    if ratio == 128:
        if workspace is None:
            raise OperandTypeError(f"{op}: workspace: expected one for ratio 128, found None")
        workspace.check(unit_limit(batch.tokens, batch.requests.shape[0], ratio), calls[0].kv)
    if index_weights is not None:
        index_weights.check(batch.tokens)
    if latents is not None:
        checks.require_shape(f"{op}: kv of latents", latents.kv, (batch.tokens, latents.kv.shape[-1]), "[T, 512]")
        latents.check()
    if not batch.tokens:
        return
    if latents is not None and calls and batch.tokens >= APART and not batch.is_decode:
        _launch(None, calls, batch, frequencies, workspace, None)
        _launch(latents, (), batch, frequencies, workspace, None)
    else:
        _launch(latents, calls, batch, frequencies, workspace, index_weights)


def _launch(
    latents: Latents | None,
    calls: Sequence[Compression],
    batch: Batch,
    frequencies: Tensor,
    workspace: Workspace | None,
    index_weights: IndexWeights | None,
) -> None:
    tokens, requests = batch.tokens, batch.requests.shape[0]
    ratio = calls[0].compressor.ratio if calls else 0
    units = unit_limit(tokens, requests, ratio) if calls else 1
    # One kernel for all sizes of decode, where no program looks through the requests for its unit.
    each, padded = 0, triton.next_power_of_2(requests)
    if batch.is_decode:
        each, padded = (min(triton.next_power_of_2(triton.cdiv(tokens, PROGRAMS)), 16) if ratio == 128 else 1), 1
    groups = triton.cdiv(units, max(each, 1))
    programs = groups * (BLOCKS.value if ratio == 128 else len(calls))
    # Rows of bf16 would be dealt to threads in eights by four warps, in fours by eight.
    is_fp32 = all(call.kv.dtype == call.score.dtype == torch.float32 for call in calls)
    large = tokens >= APART and not batch.is_decode and is_fp32
    warps, registers = (WARPS_LARGE, REGISTERS_LARGE) if large else (WARPS, REGISTERS)
    programs += index_weights.programs if index_weights else 0
    _attention_inputs[(programs + (2 * tokens if latents else 0),)](
        PassArguments.of(batch, frequencies) if calls else (),
        latents.arguments() if latents else (),
        tuple(call.arguments() for call in calls),
        workspace if ratio == 128 else (),
        index_weights.arguments() if index_weights else (),
        groups,
        ratio,
        each if calls else 0,
        padded if calls else 0,
        num_warps=warps[ratio],
        maxnreg=registers[ratio],
        **UNFUSED,
        **OVERLAPPED,
    )
