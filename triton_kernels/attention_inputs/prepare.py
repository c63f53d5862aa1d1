"""Process the output of an attention layer's first GEMM: normalise q_lora, store keys, compress, update the states.

The latents, the rows of the compressor and those of the indexer's compressor are columns of one GEMM's output
(specification §3.1, §4). None depends on another's result, and each has output buffers of its own, so each program
does one part of the work. Decode and small passes take one launch; the programs that may have a window to close come
first, since they take longest. A large prefill takes two launches, since in one launch the latents would pay for the
compressors' warps and registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from nvfp4_sgl.formats import checks

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED, after_previous
from ..common.rounding import UNFUSED
from ..plan.batch import Batch, padded_requests
from .compress_csa import compress_csa
from .compress_hca import CHANNEL_BLOCKS, compress_hca
from .compressor import Compression, Workspace
from .index_weights import IndexWeights, prefetch_index_weights, project_index_weights
from .latent import Latents, store_latent
from .windows import PassArguments, unit_limit

HCA_DECODE_PROGRAMS = 16
"""Programs of each block of channels at ratio 128 in decode: for more tokens than this, each takes several, up to 16.
With 16 blocks of channels they are 256 in all, two for each multiprocessor."""
TWO_LAUNCH_MIN_TOKENS = 2048
"""Tokens of a prefill from which latents and compressors are launched separately. Two launches take 59 µs instead of 99
for a CSA layer's 8192 tokens, but longer than one for 1024 (``launch/results/tunings_h200.md``)."""
WARPS = {0: 4, 4: 8, 128: 8}
"""Warps of a program, by ratio; 0: latents alone."""
MAX_REGISTERS = {0: None, 4: 80, 128: None}
"""Registers of a thread, by ratio. At ratio 4 the compiler would take 107, with which a Hopper multiprocessor holds two
programs rather than three."""
TWO_LAUNCH_WARPS = {0: 4, 4: 4, 128: 8}
"""``WARPS`` of a prefill of ``TWO_LAUNCH_MIN_TOKENS`` tokens or more, for rows of fp32 only. At ratio 4 sums over such
rows have the same order with four warps as with eight (:func:`.windows.pool`); at ratio 128 the order depends on the
number of warps."""
TWO_LAUNCH_MAX_REGISTERS = {0: None, 4: 128, 128: None}
"""``MAX_REGISTERS`` where ``TWO_LAUNCH_WARPS`` are used."""


@triton.jit(do_not_specialize=["groups"], do_not_specialize_on_alignment=["tokens", "requests"])
def _attention_inputs(
    batch,
    latents,
    calls,
    workspace,
    index_weights,
    tokens,
    requests,
    groups,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Compress, compute index weights and store latents, each by programs of its own.

    Grid: ``groups`` programs for each compressor of ratio 4, or for each block of channels at ratio 128; then
    ``index_weights.programs``; then two for each token, for the latents.

    Args:
        batch: ``windows.PassArguments``, or empty without ``calls``.
        latents: ``latent.LatentArguments``, or empty.
        calls: ``windows.CompressionArguments``: none, one, or two of ratio 4.
        workspace: ``compressor.Workspace`` for ratio 128, else empty.
        index_weights: ``index_weights.IndexWeightArguments``, or empty.
        tokens: of the pass; 0 if only latents are stored.
        requests: of the pass, if units are numbered: with ``calls`` and TOKENS = 0; else 0.
        RATIO: 4, 128, or 0 without ``calls``.
        TOKENS: tokens of a compressing program in decode, else 0.
        PADDED: if TOKENS is 0, a power of two, the number of requests or more.
    """
    PARTS: tl.constexpr = CHANNEL_BLOCKS if RATIO == 128 else len(calls)
    program = tl.program_id(0)
    if len(index_weights) > 0:
        number = program - groups * PARTS
        if number >= 0 and number < index_weights.programs:
            prefetch_index_weights(number, index_weights)
    after_previous()
    part, number = program // groups, program % groups
    if RATIO == 128:
        if part < PARTS:
            compress_hca(number, part, tokens, requests, batch, calls[0], workspace, TOKENS, PADDED)
    else:
        for i in tl.static_range(PARTS):
            if part == i:
                compress_csa(number, requests, batch, calls[i], TOKENS, PADDED)
    remaining = program - groups * PARTS
    if len(index_weights) > 0:
        if remaining >= 0 and remaining < index_weights.programs:
            project_index_weights(remaining, tokens, index_weights)
        remaining -= index_weights.programs
    if len(latents) > 0:  # noqa: SIM102  the outer condition is decided when the kernel is compiled
        if remaining >= 0:
            store_latent((remaining // 2).to(tl.int64), remaining % 2, latents)


def prepare_attention(
    latents: Latents | None,
    calls: Sequence[Compression],
    batch: Batch,
    frequencies: Tensor,
    *,
    workspace: Workspace | None = None,
    index_weights: IndexWeights | None = None,
    planned_tokens: int | None = None,
) -> None:
    """Store the latents of a pass, compress its complete windows into entries, and update the states.

    One launch; two from ``TWO_LAUNCH_MIN_TOKENS`` tokens on, if there are latents and compressors and the pass is not a
    decode pass. Source: specification §3.1, §4.

    Args:
        latents: the pass's; ``None`` to leave them out.
        calls: none for a window-only layer, one for an HCA layer, two for a CSA layer.
        batch: where the pass's tokens stand. Rows of padding (request slot 0, position 0, full slot 0) are stored in
            the state rows of page 0 and request 0. Rows whose slot or state row is outside its buffer are not stored.
        frequencies: fp32 [32], contiguous, radians per position: the compressed layers' RoPE frequencies. The angle of
            a window is ``fp32(position) * frequency``, one fp32 product, of its first token's position.
        workspace: from :func:`.compressor.new_workspace`; required at ratio 128.
        index_weights: of CSA layers, the head weights of up to ``index_weights.MAX_TOKENS`` tokens, computed in the
            same launch.
        planned_tokens: launches and warps are chosen for so many; for the pass's unless given.

    Rounding: q_lora as in ``hyper_connection.streams.rms_norm``, and quantised from bf16; keys as in
    ``entries.kv_entry.norm_rope_store_kv``. The state equals that of ``ops.compress_windows`` bit for bit. Entries are
    fp32 until their format's own rounding. The exponential and the sums of the pooling have an error and an order of
    their own, at most (R + 16) · 2^-23 of the largest pooled value for a window of R rows; so next to a tie a code may
    differ from the reference's by one. An entry's bytes do not depend on how its tokens are divided into passes, as
    long as the state holds them exactly. A latent's may: the order of its sum of squares depends on the number of
    warps, which changes at ``TWO_LAUNCH_MIN_TOKENS`` tokens in layers with compressors.

    Floor: every column of the GEMM's output read once, what is kept written once; for each window that closes, the
    cached rows that it needs.

    Raises:
        OperandTypeError: a dtype is not as documented in :class:`.latent.Latents`, :class:`.compressor.Compression`,
            :class:`.compressor.Workspace` or :class:`.index_weights.IndexWeights`; latents have no output; or ratio 128
            comes without a workspace.
        OperandValueError: a shape, stride, alignment or device is not as documented there, the ratios of ``calls`` are
            not one of the combinations above, or the workspace is too small.
    """
    for launch in _bind(latents, tuple(calls), batch, frequencies, workspace, index_weights, planned_tokens):
        _attention_inputs[launch.grid](
            PassArguments.of(batch, frequencies) if launch.compresses else (),
            latents.arguments() if latents is not None and launch.stores else (),
            tuple([call.arguments() for call in calls]) if launch.compresses else (),
            workspace if launch.has_workspace else (),
            index_weights.arguments() if index_weights is not None and launch.weighs else (),
            *launch.sizes,
            **launch.options,
        )


class _Launch(NamedTuple):
    """One launch of operands that look the same.

    ``compresses``, ``stores``, ``weighs``: whether compressors, latents and index weights are part of it.
    """

    grid: tuple[int]
    compresses: bool
    stores: bool
    has_workspace: bool
    weighs: bool
    sizes: tuple[int, int, int, int, int, int]
    options: dict[str, Any]


def _plan(
    latents: Latents | None,
    calls: tuple[Compression, ...],
    batch: Batch,
    index_weights: IndexWeights | None,
    large: bool,
) -> _Launch:
    tokens, requests = batch.tokens, batch.requests.shape[0]
    ratio = calls[0].compressor.ratio if calls else 0
    units = unit_limit(tokens, requests, ratio) if calls else 1
    # In decode no program searches the requests for its unit, so one kernel serves all sizes.
    tokens_per_program, padded = 0, padded_requests(requests)
    if batch.is_decode:
        tokens_per_program, padded = (
            (min(next_power_of_2(cdiv(tokens, HCA_DECODE_PROGRAMS)), 16) if ratio == 128 else 1),
            1,
        )
    groups = cdiv(units, max(tokens_per_program, 1))
    programs = groups * (CHANNEL_BLOCKS.value if ratio == 128 else len(calls))
    # Threads of four warps would hold eight columns of a bf16 row each, those of eight warps four.
    is_fp32 = all(call.kv.dtype == call.score.dtype == torch.float32 for call in calls)
    warps, registers = (TWO_LAUNCH_WARPS, TWO_LAUNCH_MAX_REGISTERS) if large and is_fp32 else (WARPS, MAX_REGISTERS)
    programs += index_weights.programs if index_weights else 0
    return _Launch(
        grid=(programs + (2 * tokens if latents else 0),),
        compresses=bool(calls),
        stores=latents is not None,
        has_workspace=ratio == 128,
        weighs=index_weights is not None,
        sizes=(
            tokens if calls or index_weights else 0,
            requests if calls and not batch.is_decode else 0,
            groups,
            ratio,
            tokens_per_program if calls else 0,
            padded if calls else 0,
        ),
        options={"num_warps": warps[ratio], "maxnreg": registers[ratio], **UNFUSED, **OVERLAPPED},
    )


@checks.once
def _bind(
    latents: Latents | None,
    calls: tuple[Compression, ...],
    batch: Batch,
    frequencies: Tensor,
    workspace: Workspace | None,
    index_weights: IndexWeights | None,
    planned_tokens: int | None,
) -> tuple[_Launch, ...]:
    """Refuse what :func:`prepare_attention` cannot read or write; metadata only. The launches of the rest."""
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
        return ()
    large = not batch.is_decode and (planned_tokens or batch.tokens) >= TWO_LAUNCH_MIN_TOKENS
    if latents is not None and calls and large:
        return _plan(None, calls, batch, None, large), _plan(latents, (), batch, None, large)
    return (_plan(latents, calls, batch, index_weights, large),)
