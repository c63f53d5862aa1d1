"""Token compression: windows of 4 or 128 tokens become one cache entry each (DEEPSEEK_V4.md §4).

For every window that a token of the pass completes::

    a = softmax over the window's rows of (score + ape[position mod ratio]), per channel
    e = rope(rmsnorm(sum_rows a * kv), position of the window's first token)

Ratio 128 pools the window's own tokens. Ratio 4 overlaps: half of the channels of the four tokens before it, the other
half of its own. The raw rows of tokens whose window is still open, and of those that the next window overlaps, stay in
SGLang's state rings. All is derived on the device from the :class:`~.batch.Batch`; one launch closes and stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import checks, index_entry, kv_entry
from .batch import Batch
from .compress_csa import compress_csa_kernel
from .compress_hca import BLOCKS, compress_hca_kernel
from .rounding import UNFUSED
from .windows import unit_limit

ROPE_DIM = 64
PROGRAMS = 16
"""Of each block of channels of ratio 128 in decode, before they take several tokens: 256 in all, two a processor."""


@dataclass(frozen=True)
class Compressor:
    """One compressor of one layer.

    Attributes:
        ratio: 4 or 128.
        ape: fp32 [ratio, w], contiguous; w = 2n for ratio 4, n for ratio 128.
        norm: bf16 or fp32 [n]; n = 512 for entries, 128 for the indexer's keys (ratio 4 only).
        norm_eps: added to the mean square.
    """

    ratio: int
    ape: Tensor
    norm: Tensor
    norm_eps: float

    @property
    def size(self) -> int:
        """n, the width of an entry."""
        return self.norm.shape[0]

    @property
    def width(self) -> int:
        """w, the width of a token's row."""
        return 2 * self.size if self.ratio == 4 else self.size


@dataclass(frozen=True)
class Compression:
    """What a compressor reads and writes in a pass.

    Attributes:
        compressor: its parameters.
        kv, score: fp32 or bf16 [T, w], raw, the last dimension contiguous: columns of a product.
        state: fp32 or bf16 [rows, 2w], rows contiguous; ``kv | score`` of earlier tokens in SGLang's rings (Batch says
            which row is whose), updated in place. Other rows are neither read nor written.
        pages: the pool of entries, updated in place. uint8: 584-byte entries (``kv_entry``) for n = 512, 132-byte ones
            (``index_entry``) for n = 128, which the Hadamard matrix rotates first. bf16 or fp32 [pages, page_size·n]:
            the rows themselves.
        page_size: entries of a page.
    """

    compressor: Compressor
    kv: Tensor
    score: Tensor
    state: Tensor
    pages: Tensor
    page_size: int


@dataclass(frozen=True)
class Workspace:
    """Where the programs of a ratio-128 window meet; one serves all layers of a stream, one after another.

    Attributes:
        pooled: fp32 [units, 512]. arrivals: int32 [units], zero between launches.
    """

    pooled: Tensor
    arrivals: Tensor


def new_workspace(tokens: int, requests: int, device: torch.device | str) -> Workspace:
    """Enough for passes of up to ``tokens`` tokens of up to ``requests`` requests, at ratio 128."""
    units = unit_limit(tokens, requests, 128)
    return Workspace(
        torch.empty(units, kv_entry.DIM, dtype=torch.float32, device=device),
        torch.zeros(units, dtype=torch.int32, device=device),
    )


def compress(call: Compression, batch: Batch, frequencies: Tensor, *, workspace: Workspace | None = None) -> None:
    """Close the windows of a pass, store their entries and bring the state up to date.

    Args:
        call: the compressor, what it reads and what it writes.
        batch: where the pass's tokens stand. Rows of padding (request slot 0, position 0, full slot 0) end in the state
            rows of page 0 and request 0. A slot or state row outside its buffer is left out.
        frequencies: fp32 [32], the compressed layers' RoPE frequencies.
        workspace: for ratio 128, from :func:`new_workspace`.

    The window's angle is ``fp32(position) * frequency``, one fp32 product, of its first token's position.

    Rounding: the state equals that of ``ops.compress_windows`` bit for bit. Entries are fp32 up to their format's own
    rounding. The pooling's exponential and sums have an error and an order of their own: (R + 16) · 2^-23 of the
    largest pooled value at most, of a window of R rows; so next to a tie a code may differ from the reference's by one.
    How its tokens are dealt to passes does not change an entry's bytes, as long as the state holds them exactly.

    Floor: every new row read once, what is kept written once; per closing window the cached rows it needs.
    """
    if call.compressor.ratio == 4:
        _launch_csa([call], batch, frequencies)
    else:
        _launch_hca(call, batch, frequencies, workspace)


def compress_pair(main: Compression, index: Compression, batch: Batch, frequencies: Tensor) -> None:
    """:func:`compress` of the two compressors of a CSA layer, in one launch."""
    for name, call in (("main", main), ("index", index)):
        checks.require_one_of(f"compress_pair: ratio of {name}", call.compressor.ratio, (4,))
    _launch_csa([main, index], batch, frequencies)


def _launch_csa(calls: list[Compression], batch: Batch, frequencies: Tensor) -> None:
    batch.check("compress")
    for call in calls:
        _check(call, batch, frequencies)
    requests = batch.requests.shape[0]
    if batch.tokens:
        first, other = calls[0], calls[-1]
        compress_csa_kernel[(unit_limit(batch.tokens, requests, 4), len(calls))](
            batch.owners,
            batch.starts,
            batch.bounds,
            batch.requests,
            batch.slots,
            batch.full_to_swa,
            frequencies,
            requests,
            batch.slots.stride(0),
            *_operands(first),
            *_operands(other),
            first.compressor.size,
            first.page_size,
            other.compressor.size,
            other.page_size,
            batch.is_decode,
            _padded(batch),
            num_warps=4,
            **UNFUSED,
        )


def _launch_hca(call: Compression, batch: Batch, frequencies: Tensor, workspace: Workspace | None) -> None:
    batch.check("compress")
    _check(call, batch, frequencies)
    requests = batch.requests.shape[0]
    units = unit_limit(batch.tokens, requests, 128)
    if workspace is None:
        raise checks.OperandTypeError("compress: workspace: expected one for ratio 128, found None")
    _check_workspace(workspace, units, call.kv)
    if batch.tokens:
        *tensors, eps, kv_row, score_row, state_row, state_rows, page_stride, capacity = _operands(call)
        per_program = min(triton.next_power_of_2(triton.cdiv(batch.tokens, PROGRAMS)), 16) if batch.is_decode else 0
        compress_hca_kernel[(triton.cdiv(units, max(per_program, 1)), BLOCKS.value)](
            batch.owners,
            batch.starts,
            batch.bounds,
            batch.requests,
            batch.slots,
            frequencies,
            batch.tokens,
            requests,
            batch.slots.stride(0),
            *tensors,
            workspace.pooled,
            workspace.arrivals,
            eps,
            kv_row,
            score_row,
            state_row,
            state_rows,
            page_stride,
            capacity,
            call.page_size,
            per_program,
            _padded(batch),
            num_warps=8,
            **UNFUSED,
        )


def _padded(batch: Batch) -> int:
    """Requests that a program looks through for its unit; one kernel for all sizes of decode, where it need not."""
    return 1 if batch.is_decode else triton.next_power_of_2(batch.requests.shape[0])


def _operands(call: Compression) -> tuple[object, ...]:
    """A compressor's run-time arguments, in the kernels' order."""
    return (
        call.kv,
        call.score,
        call.state,
        call.compressor.ape,
        call.compressor.norm,
        call.pages,
        call.compressor.norm_eps,
        call.kv.stride(0),
        call.score.stride(0),
        call.state.stride(0),
        call.state.shape[0],
        call.pages.stride(0),
        call.pages.shape[0] * call.page_size,
    )


def _check(call: Compression, batch: Batch, frequencies: Tensor) -> None:
    compressor, floats = call.compressor, (torch.float32, torch.bfloat16)
    checks.require_one_of("compress: ratio", compressor.ratio, (4, 128))
    checks.require_dimensions("compress: norm", compressor.norm, 1, "[n]")
    checks.require_one_of("compress: n", compressor.size, (512, 128) if compressor.ratio == 4 else (512,))
    checks.require_dtype("compress: norm", compressor.norm, *floats)
    checks.require_contiguous("compress: norm", compressor.norm)
    width = compressor.width
    checks.require_dtype("compress: ape", compressor.ape, torch.float32)
    checks.require_shape("compress: ape", compressor.ape, (compressor.ratio, width), "[ratio, w]")
    checks.require_contiguous("compress: ape", compressor.ape)
    for name, rows in (("kv", call.kv), ("score", call.score)):
        checks.require_dtype(f"compress: {name}", rows, *floats)
        checks.require_shape(f"compress: {name}", rows, (batch.tokens, width), "[T, w]")
        checks.require_rows(f"compress: {name}", rows)
    checks.require_dtype("compress: state", call.state, *floats)
    checks.require_dimensions("compress: state", call.state, 2, "[rows, 2w]")
    checks.require_shape("compress: state", call.state, (call.state.shape[0], 2 * width), "[rows, 2w]")
    checks.require_rows("compress: state", call.state)
    _check_pages(call)
    checks.require_shape("compress: frequencies", frequencies, (ROPE_DIM // 2,), "[rope_dim/2]")
    checks.require_dtype("compress: frequencies", frequencies, torch.float32)
    checks.require_contiguous("compress: frequencies", frequencies)
    checks.require_same_device(
        "kv",
        call.kv,
        score=call.score,
        state=call.state,
        pages=call.pages,
        ape=compressor.ape,
        norm=compressor.norm,
        frequencies=frequencies,
        slots=batch.slots,
    )


def _check_pages(call: Compression) -> None:
    size = call.compressor.size
    if call.pages.dtype == torch.uint8:
        entry = kv_entry if size == kv_entry.DIM else index_entry
        checks.require_pages("compress: pages", call.pages, entry.page_bytes(call.page_size), call.page_size)
        return
    checks.require_dtype("compress: pages", call.pages, torch.uint8, torch.bfloat16, torch.float32)
    expected = (call.pages.shape[0], call.page_size * size)
    checks.require_shape("compress: pages", call.pages, expected, "[pages, page_size * n]")
    checks.require_rows("compress: pages", call.pages)


def _check_workspace(workspace: Workspace, units: int, kv: Tensor) -> None:
    pooled, arrivals = workspace.pooled, workspace.arrivals
    checks.require_dtype("compress: workspace.pooled", pooled, torch.float32)
    checks.require_dtype("compress: workspace.arrivals", arrivals, torch.int32)
    for name, tensor in (("pooled", pooled), ("arrivals", arrivals)):
        checks.require_contiguous(f"compress: workspace.{name}", tensor)
    checks.require_shape("compress: workspace.pooled", pooled, (arrivals.shape[0], kv_entry.DIM), "[units, 512]")
    checks.require_same_device("kv", kv, pooled=pooled, arrivals=arrivals)
    if arrivals.shape[0] < units:
        raise checks.OperandValueError(
            f"compress: workspace: expected at least {units} units, found {arrivals.shape[0]}"
        )
