"""Sparse attention: one softmax with a sink over the window and the selected compressed entries (specification §3.3).

Contract: ``nvfp4_sgl.ops.attention.sparse_attention``. A key is its own value, 512 wide, read in place from SGLang's
pages of 584-byte entries (``nvfp4_sgl.formats.kv_entry``) or from rows of bf16::

    s_j = (q · k_j) · scale
    o   = Σ_j exp(s_j − m) k_j / (Σ_j exp(s_j − m) + exp(sink − m)),  m = max(s_j, sink)

A program serves up to 64 heads of one query and one split of its keys (``tiling``): it reads each entry once for all of
these heads and decodes it to bf16 on the way to the tensor cores (``kernel``). Where the queries alone do not fill the
chip, the keys are split; then the programs wait for one another and add the parts in a fixed order (``parts``). Where
the next GEMM takes NVFP4 activations, the output is quantised in the same launch (``quantized_output``). Only
``tiling`` and ``splits`` depend on the batch, and on its size alone: with the same two, a query's result has the same
bits in a prompt, in a chunk of it, or alone, wherever its entries lie. Where a rank has few heads, neighbouring queries
of a long prompt, or of a draft that is verified, share a program (``query_block``), and the last bits depend on a
query's place among them.

The last 64 columns of ``o`` are still rotated by the keys' positions. Given ``cos_sin`` of the queries' positions
(``common.rope.rope_cos_sin``) they are rotated back before ``o`` is rounded, as specification §3.3 requires.

Supports keys of 512 values of which the last 64 are rotated, any number of heads, pages of a power of two of entries.
Window and extra entries must be of one kind, packed or bf16.

Precision:

* a decoded entry is exact in bf16: E4M3 has 4 significant bits of bf16's 8, and a power of two only moves the exponent
  (least result of ``kv_entry.pack``: 2^-9 · 2^-22; greatest: below 2^128);
* of raw queries (``query_eps``) only the last 64 columns are rounded: rotated in fp32, then rounded to bf16 once. The
  logits are multiplied by the inverse root mean square, fp32. Where the squares of a query overflow fp32, the query
  counts as 0. Keys whose dot product with it overflows, too, are left out of its softmax;
* logits, maxima and sums are fp32; the weights exp(s − m) ≤ 1 are rounded to bf16 for the second MMA, while the
  denominator adds them unrounded; the output is rounded once. So, with the exact weights w_j = exp(s_j − m) over the
  denominator, |error| ≤ (2^-8 + 2^-8 + small) · Σ_j w_j |k_j| per element, small being the fp32 error of the logits.
  Rotated back, the bound of an element of a pair is its own times |cos| plus its partner's times |sin|.

Floor: 584 bytes per entry and query (1024 for bf16 rows) plus q and o; 2·(512 + 512) operations per head and entry.
For 64 heads and 584 bytes that is 224 operations per byte, near the balance of an H200, so both floors matter.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from nvfp4_sgl.formats.checks import (
    once,
    require_aligned,
    require_contiguous,
    require_dimensions,
    require_dtype,
    require_pages,
    require_power_of_two,
    require_range,
    require_rows,
    require_same_device,
    require_shape,
)
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.limits import MAX_QUERY_EPS, ROPE_DIM

from ..common import chip
from ..common.integers import cdiv, cut
from ..entries.kv_entry import DIM, page_bytes
from ..quantize.rows import check_rows, rows_arguments
from .kernel import attend
from .parts import LOG2_E
from .query_block import attend_block
from .tiling import Tiling, choose_splits, choose_tiling, fuses_quantization, most_splits


class Entries(NamedTuple):
    """A pool of keys, read in place.

    Attributes:
        pages: packed, uint8 [pages, >= ``page_bytes(P)``], the last dimension contiguous, pages at multiples of 16
            bytes; or plain, bf16 [pages, P·512], contiguous.
        page_size: P, entries of a page, a power of two; slot = page · P + row.
    """

    pages: Tensor
    page_size: int


class Partials(NamedTuple):
    """Workspace of a split launch: the S parts of each query; programs without a part store none.

    Attributes:
        values: fp32 [T, H, S, 512], each part divided by its own sum of weights, not rotated back.
        stats: fp32 [T, H, S, 2]: a part's maximum, times log2(e) and not below the sink's, and its sum of weights
            relative to that maximum. Where the output is quantised, [T, H, S, 3]: the third is the largest magnitude of
            the share of columns that the program adds.
    """

    values: Tensor
    stats: Tensor


def new_partials(q: Tensor, splits: int, *, quantized: bool = False) -> Partials | None:
    """Allocate the workspace of a launch in ``splits`` splits; ``None`` for one split, which needs none.

    Args:
        q: [T, H, 512], the queries of the launch.
        splits: S.
        quantized: whether the launch writes ``out_rows``.
    """
    if splits == 1:
        return None
    rows, widths = (*q.shape[:2], splits), (DIM, 3 if quantized else 2)
    return Partials(*(torch.empty(*rows, width, dtype=torch.float32, device=q.device) for width in widths))


def new_semaphores(tokens: int, heads: int, device: torch.device | str) -> Tensor:
    """Allocate zeroed semaphores for launches of up to ``tokens`` queries of ``heads`` heads, one launch at a time."""
    return torch.zeros(tokens * heads, dtype=torch.int32, device=device)


def sparse_attention(
    q: Tensor,
    window: Entries,
    window_slots: Tensor,
    sink: Tensor,
    scale: float,
    extra: Entries | None = None,
    extra_slots: Tensor | None = None,
    *,
    window_lengths: Tensor | None = None,
    extra_lengths: Tensor | None = None,
    cos_sin: Tensor | None = None,
    query_eps: float | None = None,
    splits: int | None = None,
    partials: Partials | None = None,
    semaphores: Tensor | None = None,
    out: Tensor | None = None,
    out_rows: Rows | None = None,
    tiling: Tiling | None = None,
    owners: Tensor | None = None,
    tokens_each: int | None = None,
    expected_extra: int | None = None,
    planned_queries: int | None = None,
) -> None:
    """Attend to two sets of cached entries and a sink in one softmax; keys are the values too (specification §3.3).

    The module's docstring has the formula, the precision and the floor.

    Args:
        q: bf16 [T, H, 512], the last dimension contiguous, 16-byte aligned; any H. Normalised and rotated queries or,
            with ``query_eps``, raw projections.
        window: the sliding window's pool.
        window_slots: int32 or int64 [T, W], contiguous: each query's slots in it; negative slots are skipped.
        sink: fp32 [H], contiguous, finite, in logit units, not scaled; it has no value.
        scale: softmax scale, ``512**-0.5``.
        extra: the pool of compressed entries, packed or plain like the window; ``None`` in window-only layers.
        extra_slots: [T, K] in the dtype of ``window_slots``, contiguous; ``None`` in window-only layers.
        window_lengths, extra_lengths: int32 or int64 [T], contiguous: number of leading columns that count; columns
            beyond are ignored, whatever they hold. By default all columns count.
        cos_sin: fp32 [T, 64], contiguous, from ``common.rope.rope_cos_sin`` of the queries' positions: the output's
            last 64 columns are rotated back by it, in fp32. ``None``: no inverse RoPE.
        query_eps: ``q`` is raw: divide each row of ``q`` (in effect its logits) by its root mean square, with
            ``query_eps`` added to the mean square, and rotate its last 64 columns by ``cos_sin``, which is then
            required. ``None``: ``q`` is ready.
        splits: programs per query and block of heads, 1 to :func:`most_splits` of this device; by default chosen by
            :func:`choose_splits`.
        partials: from :func:`new_partials` for the same shape and splits; allocated unless given.
        semaphores: from :func:`new_semaphores`, zero before and after the launch; used where keys are split. ``None``:
            allocated here, which is one more launch.
        out: bf16 [T, H, 512], contiguous, 16-byte aligned, written. A query that sees no entry gives 0.
        out_rows: [T, G, H/G · 512], written: each group's heads as one NVFP4 row, equal bit for bit to
            ``quantize.quantize.quantize`` of ``out``. For numbers of groups that :func:`fuses_quantization` accepts. At
            least one of ``out`` and ``out_rows`` is required.
        tiling: by default chosen by :func:`choose_tiling` for this device.
        owners: int32 or int64 [T], contiguous: the request of each query, request by request. Neighbouring queries of
            one request then share programs, which relies on this: they have successive positions; column c of
            ``window_slots`` is the slot of the c-th position back from a query's own, and ``window_lengths`` the number
            of these that there are, at least 1; and extra slots of the one are the first of those of the next. ``None``
            where lists may differ otherwise.
        tokens_each: queries of each request, where all have as many: blocks of queries that share a program are cut
            inside requests. Queries of a request may then also be all at position 0, as padding's are.
        expected_extra: columns of ``extra_slots`` that mostly count, where its width is that of the longest list that
            may come: the tiling is then chosen for so many. By default all.
        planned_queries: T or more: tiling and splits are chosen for so many. By default T.

    Raises:
        OperandTypeError: a dtype is not one of the above, neither ``out`` nor ``out_rows`` is given, or ``query_eps``
            comes without ``cos_sin``.
        OperandValueError: a shape, stride, alignment or device is not as above, a page size is not a power of two,
            ``splits`` or ``query_eps`` is out of range, attention cannot quantise these groups, or there are too few
            semaphores.
    """
    has_extra = extra is not None and extra_slots is not None
    if extra is None or extra_slots is None:
        # Placeholders of the right types; the kernel does not read them.
        extra, extra_slots, extra_lengths = window, window_slots, None
    processors = chip.processors(q.device)
    launch = _bind(
        q, (window, window_slots, window_lengths), (extra, extra_slots, extra_lengths), has_extra, sink, cos_sin,
        query_eps, (owners, tokens_each), out, out_rows, splits, tiling, expected_extra, planned_queries, processors,
    )  # fmt: skip
    if partials is None and launch.splits > 1:
        partials = new_partials(q, launch.splits, quantized=out_rows is not None)
    if partials is not None and semaphores is None:
        semaphores = new_semaphores(q.shape[0], q.shape[1], q.device)
    if partials is not None or semaphores is not None:
        _check_workspace(q, launch.splits, partials, semaphores, quantized=out_rows is not None)
    if launch.grid is None:
        return

    packed, columns, heads = launch.packed, launch.columns, q.shape[1]
    inputs = (
        *(q, q.stride(0), q.stride(1)),
        *(window.pages if packed else window.pages.view(torch.uint8), launch.strides[0], window_slots),
        *(window_slots if window_lengths is None else window_lengths, columns[0]),
        *(extra.pages if packed else extra.pages.view(torch.uint8), launch.strides[1], extra_slots),
        *(extra_slots if extra_lengths is None else extra_lengths, columns[1]),
        *(sink, scale * LOG2_E.value, sink if cos_sin is None else cos_sin),
    )
    eps = 0.0 if query_eps is None else query_eps
    if launch.queries > 1:
        attend_block[launch.grid](*inputs, owners, out, q.shape[0], heads, eps, **launch.constants)
        return
    target, stats = (out, q) if partials is None else partials
    attend[launch.grid](
        *(*inputs, target, stats, heads, eps, stats if semaphores is None else semaphores, out),
        () if out_rows is None else rows_arguments(out_rows),
        SPLIT=partials is not None,
        **launch.constants,
    )


class _Launch(NamedTuple):
    """The launch of operands that look the same.

    ``queries``: of a program; ``columns``: of the lists of slots; ``strides``: bytes between the pages, or rows, of the
    pools; ``grid``: None if there is nothing to do.
    """

    splits: int
    queries: int
    packed: bool
    columns: tuple[int, int]
    strides: tuple[int, int]
    grid: tuple[int, ...] | None
    constants: dict[str, Any]


_Keys = tuple[Entries, Tensor, Tensor | None]
"""A pool, the slots of each query in it, and how many of them count."""


@once
def _bind(
    q: Tensor,
    window_keys: _Keys,
    extra_keys: _Keys,
    has_extra: bool,
    sink: Tensor,
    cos_sin: Tensor | None,
    query_eps: float | None,
    requests: tuple[Tensor | None, int | None],
    out: Tensor | None,
    out_rows: Rows | None,
    splits: int | None,
    tiling: Tiling | None,
    expected_extra: int | None,
    planned_queries: int | None,
    processors: int,
) -> _Launch:
    """Refuse operands that the kernels cannot read or write, and choose tiling and splits; metadata only.

    requests: ``owners`` and ``tokens_each``.
    """
    owners, tokens_each = requests
    _check_queries(q, sink, cos_sin, query_eps, owners)
    _check_sets(q, *window_keys, *extra_keys)
    (window, window_slots, window_lengths), (extra, extra_slots, extra_lengths) = window_keys, extra_keys
    tokens, heads = q.shape[:2]
    packed = window.pages.dtype == torch.uint8
    columns = window_slots.shape[1], extra_slots.shape[1] if has_extra else 0
    planned = planned_queries or tokens
    if tokens_each is not None and (tokens_each < 1 or tokens % tokens_each):
        raise OperandValueError(f"tokens_each: expected a divisor of the {tokens} queries of q, found {tokens_each}")
    if tiling is None:
        shares = owners is not None and out is not None and out_rows is None and splits in (None, 1)
        sizes = planned, heads, columns, processors
        tiling = choose_tiling(*sizes, packed=packed, together=shares, each=tokens_each, expected=expected_extra)
    if splits is None:
        splits = 1 if tiling.queries > 1 else choose_splits(planned, heads, columns, processors, tiling)
    require_range("splits", splits, 1, most_splits(tokens, heads, processors, tiling) if q.is_cuda else math.inf)
    group = _check_outputs(q, out, out_rows)
    constants = {
        "RAW": query_eps is not None,
        "PACKED": packed,
        "WINDOW_SHIFT": window.page_size.bit_length() - 1,
        "EXTRA_SHIFT": extra.page_size.bit_length() - 1,
        "HAS_EXTRA": has_extra,
        "HAS_WINDOW_LENGTHS": window_lengths is not None,
        "HAS_EXTRA_LENGTHS": extra_lengths is not None,
        "HAS_COS_SIN": cos_sin is not None,
        **_tiling_constants(tiling),
    }
    grid: tuple[int, ...] | None
    if tiling.queries > 1:
        _require_a_block(tiling, heads, columns[0], splits, out, owners)
        grid, block = (cdiv(tokens, tiling.queries),), 0
        if tokens_each:
            blocks, block = cut(tokens_each, tiling.queries)
            grid = blocks, tokens // tokens_each
        constants |= {"QUERIES": tiling.queries, "EACH": tokens_each or 0, "BLOCK": block}
    else:
        head_blocks = cdiv(heads, tiling.heads)
        grid = tokens * head_blocks, splits
        constants |= {"HEAD_BLOCKS": head_blocks, "TRANSPOSED": tiling.transposed, "WARPS": tiling.warps}
        constants["GROUP"] = group
    strides = _pool_stride(window.pages), _pool_stride(extra.pages)
    return _Launch(splits, tiling.queries, packed, columns, strides, grid if tokens and heads else None, constants)


def _tiling_constants(tiling: Tiling) -> dict[str, Any]:
    """Constants and launch options that follow from the tiling alone, for either kernel.

    The launch is an ordinary one, not ``OVERLAPPED`` like those of all other kernels. If programs of attention are
    placed while the kernel before still runs, they gather on the multiprocessors that become free first. The gap of an
    ordinary launch costs less: a step of one request takes 855 µs instead of 877 on Hopper
    (``launch/results/tunings_h200.md``). It has not been measured on Blackwell.
    """
    constants: dict[str, Any] = {"HEADS": tiling.heads, "KEYS": tiling.keys, "STAGES": tiling.stages}
    constants |= {"LOGITS_IN_BRANCH": tiling.apart, "PIECES": tiling.pieces}
    return {**constants, "num_warps": tiling.warps, "num_stages": tiling.stages}


def _require_a_block(
    tiling: Tiling, heads: int, window: int, splits: int, out: Tensor | None, owners: Tensor | None
) -> None:
    """Refuse a tiling of several queries where it does not suit the rest; metadata only."""
    count = tiling.queries
    if out is None or owners is None or splits > 1 or heads * count > tiling.heads or window < count:
        raise OperandValueError(
            f"tiling: {count} queries of a program take at most {tiling.heads // count} heads, a window of at least"
            f" {count}, one split, out and owners. Found {heads} heads, a window of {window}, {splits} splits, out"
            f" {'missing' if out is None else 'given'} and owners {'missing' if owners is None else 'given'}"
        )


def _check_queries(
    q: Tensor, sink: Tensor, cos_sin: Tensor | None, query_eps: float | None, owners: Tensor | None
) -> None:
    """Refuse queries, sinks, rotations and owners that the kernel cannot read; metadata only."""
    require_dimensions("q", q, 3, "[T, H, 512]")
    tokens, heads = q.shape[:2]
    require_shape("q", q, (tokens, heads, DIM), "[T, H, 512]")
    require_dtype("q", q, torch.bfloat16)
    require_rows("q", q)
    require_aligned("q", q)
    require_shape("sink", sink, (heads,), "[H]")
    require_dtype("sink", sink, torch.float32)
    require_contiguous("sink", sink)
    if cos_sin is not None:
        require_shape("cos_sin", cos_sin, (tokens, ROPE_DIM), "[T, 64]")
        require_dtype("cos_sin", cos_sin, torch.float32)
        require_contiguous("cos_sin", cos_sin)
    if query_eps is not None:
        require_range("query_eps", query_eps, 0.0, MAX_QUERY_EPS)
        if cos_sin is None:
            raise OperandTypeError(
                "cos_sin: expected fp32 [T, 64], by which raw queries are rotated, found None with query_eps; pass"
                " cos_sin, or leave out query_eps if the queries are rotated already"
            )
    if owners is not None:
        require_shape("owners", owners, (tokens,), "[T]")
        require_dtype("owners", owners, torch.int32, torch.int64)
        require_contiguous("owners", owners)
    require_same_device("q", q, sink=sink, cos_sin=cos_sin, owners=owners)


@once
def _check_workspace(
    q: Tensor, splits: int, partials: Partials | None, semaphores: Tensor | None, *, quantized: bool
) -> None:
    """Refuse partials and semaphores that do not suffice; metadata only."""
    tokens, heads = q.shape[:2]
    if partials is not None:
        for name, part, width in (("values", partials.values, DIM), ("stats", partials.stats, 3 if quantized else 2)):
            require_shape(f"partials.{name}", part, (tokens, heads, splits, width), "[T, H, splits, 512 or 2 or 3]")
            require_dtype(f"partials.{name}", part, torch.float32)
            require_contiguous(f"partials.{name}", part)
            require_same_device("q", q, **{name: part})
    if semaphores is not None:
        require_dtype("semaphores", semaphores, torch.int32)
        require_contiguous("semaphores", semaphores)
        require_range("number of semaphores", semaphores.numel(), tokens * heads, math.inf)
        require_same_device("q", q, semaphores=semaphores)


def _check_outputs(q: Tensor, out: Tensor | None, out_rows: Rows | None) -> int:
    """Check both outputs and return the heads of a group, 1 where nothing is quantised; metadata only."""
    tokens, heads = q.shape[:2]
    if out is not None:
        require_shape("out", out, q.shape, "[T, H, 512]")
        require_dtype("out", out, torch.bfloat16)
        require_contiguous("out", out)
        require_aligned("out", out)
        require_same_device("q", q, out=out)
    elif out_rows is None:
        raise OperandTypeError("out: expected out, out_rows or both, found neither")
    if out_rows is None:
        return 1
    require_dimensions("out_rows.codes", out_rows.codes, 3, "[T, G, K/2]")
    groups = out_rows.codes.shape[1]
    if not fuses_quantization(heads, groups):
        raise OperandValueError(
            f"out_rows.codes: expected groups of 1, 2, 4, 8 or 16 heads, found {groups} groups of {heads} heads"
        )
    check_rows("out_rows", out_rows, (tokens, groups), heads // groups * DIM, q)
    return heads // groups


def _pool_stride(pages: Tensor) -> int:
    """The pool's stride in bytes: that of pages (packed) or of rows (plain)."""
    return pages.stride(0) if pages.dtype == torch.uint8 else DIM * pages.element_size()


def _check_sets(
    q: Tensor,
    window: Entries,
    window_slots: Tensor,
    window_lengths: Tensor | None,
    extra: Entries,
    extra_slots: Tensor,
    extra_lengths: Tensor | None,
) -> None:
    """Refuse two sets of entries that the kernel cannot read together; metadata only."""
    tokens = q.shape[0]
    _require_set("window", window, window_slots, window_lengths, tokens)
    _require_set("extra", extra, extra_slots, extra_lengths, tokens)
    require_dtype("extra.pages", extra.pages, window.pages.dtype)
    require_dtype("extra_slots", extra_slots, window_slots.dtype)
    require_same_device(
        "q", q, window=window.pages, window_slots=window_slots, window_lengths=window_lengths, extra=extra.pages,
        extra_slots=extra_slots, extra_lengths=extra_lengths,
    )  # fmt: skip


def _require_set(name: str, entries: Entries, slots: Tensor, lengths: Tensor | None, tokens: int) -> None:
    """Refuse a set of entries that the kernel cannot read; metadata only."""
    pages, page_size = entries
    require_power_of_two(f"{name}.page_size", "entries of a page", page_size)
    if pages.dtype == torch.uint8:
        require_pages(f"{name}.pages", pages, page_bytes(page_size), page_size)
    else:
        require_dtype(f"{name}.pages", pages, torch.bfloat16, torch.uint8)
        require_shape(f"{name}.pages", pages, (pages.shape[0], page_size * DIM), "[pages, page_size · 512]")
        require_contiguous(f"{name}.pages", pages)
        require_aligned(f"{name}.pages", pages)
    require_dimensions(f"{name}_slots", slots, 2, "[T, columns]")
    require_shape(f"{name}_slots", slots, (tokens, slots.shape[1]), "[T, columns]")
    require_dtype(f"{name}_slots", slots, torch.int32, torch.int64)
    require_contiguous(f"{name}_slots", slots)
    if lengths is not None:
        require_shape(f"{name}_lengths", lengths, (tokens,), "[T]")
        require_dtype(f"{name}_lengths", lengths, torch.int32, torch.int64)
        require_contiguous(f"{name}_lengths", lengths)
