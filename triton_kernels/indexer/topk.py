"""Select the topk best entries of each query without sorting, by histograms and prefix sums (specification §5).

A query at position p sees ratio-4 entries ``w < (p + 1) // 4``; if they are more than topk, it attends to the topk of
the largest scores. A row of up to :data:`CHUNK_SCORES` scores takes one program (:mod:`.select_row`).

A longer row is divided into chunks. Each chunk nominates its own topk best as candidates, which include all of the
row's best, and increments a semaphore; the last program to finish makes the same selection among the candidates. No
program waits. Of equal scores the lower entry wins in either case, and nothing depends on timing: the result depends on
the scores alone.

Scores are ordered as numbers, −inf to +inf; −0 equals +0, and NaN is below all.

Supports topk up to ``MAX_INDEX_TOPK``, and rows of as many chunks as nominate ``MAX_CANDIDATES``. Floor: 4 bytes per
visible entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from nvfp4_sgl.formats import checks
from nvfp4_sgl.limits import CHUNK_SCORES, MAX_CANDIDATES, MAX_INDEX_TOPK

from ..common.integers import cdiv, next_power_of_2
from ..common.overlap import OVERLAPPED
from ..plan.batch import Batch
from .select_row import _select_kernel

THREADS = 512
"""Threads at most of a program; 128 at least."""
SCORES_PER_THREAD = 4
"""Scores of a thread, unless :data:`THREADS` are too few.

On an H200 one row of 1,024 scores takes 0.90 of the time that it takes with eight, but 4,096 rows take 1.12 of it
(``launch/results/tunings_h200.md``).
"""
KEPT_MAX = 2048
"""Scores at most that a program keeps all, without finding a bound first."""
MAX_REGISTERS = 64
"""Registers of a thread at most, so that a multiprocessor holds two programs: one loads while the other counts."""


@dataclass(frozen=True)
class Candidates:
    """Workspace in which the chunks of a row collect their candidates.

    One workspace serves all layers of a CUDA stream, one after another.

    Attributes:
        nominated: int32 [rows, 2, candidates]: the bits of fp32 scores, then entries.
        semaphores: int32 [rows], the chunks of a row that are done; zero between launches.
    """

    nominated: Tensor
    semaphores: Tensor


def new_candidates(rows: int, columns: int, topk: int, device: torch.device | str) -> Candidates:
    """Allocate the workspace for up to ``rows`` rows of ``columns`` columns; no candidates where a row is one chunk."""
    chunks = cdiv(columns, CHUNK_SCORES) if columns > CHUNK_SCORES else 0
    nominated = torch.empty(rows, 2, chunks * topk, dtype=torch.int32, device=device)
    return Candidates(nominated, torch.zeros(rows, dtype=torch.int32, device=device))


def select_entries(
    scores: Tensor,
    batch: Batch,
    topk: int,
    slots: Tensor,
    lengths: Tensor,
    *,
    first: int = 0,
    candidates: Candidates | None = None,
) -> None:
    """Select the slots of each query's ``topk`` best visible ratio-4 entries by their scores (specification §5).

    Args:
        scores: fp32 [rows, columns] from :func:`.scores.index_scores`, the last dimension contiguous; row i belongs to
            token ``first + i``. Columns that the token does not see may be read, to no effect. Entries beyond
            ``columns`` are left out.
        batch: where all tokens of the pass stand.
        topk: 1 to 2048; ``topk`` times the chunks of a row (``columns`` / 16384, rounded up) is at most 16384.
        slots: int32 [rows, topk], contiguous, written: slots of the selected entries in the order of the entries, then
            -1.
        lengths: int32 [rows], contiguous, written: number of slots, ``min(visible, topk)``.
        first: the token of the first row.
        candidates: from :func:`new_candidates`, for as many rows and columns or more; required, and used, beyond 16384
            columns only.

    One launch, whose grid depends on shapes alone. Floor: 4 bytes per visible entry. Scores are compared, never
    rounded.

    Raises:
        OperandTypeError: a dtype is not one of the above, or ``candidates`` are missing.
        OperandValueError: a shape, stride or device is not as above, ``topk`` or ``first`` is out of range, or the
            candidates are too few.
    """
    rows, columns, chunks = _check(scores, batch, topk, slots, lengths, first, candidates, CHUNK_SCORES)
    if not rows:
        return
    pages, nominated, semaphores, of_each = batch.pages, None, None, 0
    if chunks > 1:
        assert candidates is not None  # as _check requires
        nominated, semaphores, of_each = candidates.nominated, candidates.semaphores, candidates.nominated.shape[2]
    block = max(128, next_power_of_2(min(columns, CHUNK_SCORES)))
    threads = min(THREADS, max(128, block // SCORES_PER_THREAD))
    of_candidates = max(threads, next_power_of_2(topk * chunks))
    _select_kernel[(rows, chunks)](
        scores,
        scores.stride(0),
        columns,
        batch.positions,
        batch.owners,
        pages,
        pages.stride(0),
        slots,
        lengths,
        first,
        nominated,
        of_each,
        semaphores,
        topk,
        _kept(block, topk, threads),
        block,
        _in_fours(scores, scores.stride(0)),
        _kept(of_candidates, topk, threads),
        of_candidates,
        nominated is not None and _in_fours(nominated, 2 * of_each),
        threads,
        num_warps=threads // 32,
        maxnreg=MAX_REGISTERS,
        **OVERLAPPED,
    )


def _kept(block: int, topk: int, threads: int) -> int:
    """Return how many of ``block`` scores a program keeps at most before it compares single ones."""
    return block if block <= KEPT_MAX else min(max(2 * next_power_of_2(topk), threads), block)


def _in_fours(rows: Tensor, stride: int) -> bool:
    """Say whether a thread may load four values at once, from the begin of any row."""
    return stride % 4 == 0 and rows.data_ptr() % 16 == 0


@checks.once
def _check(
    scores: Tensor,
    batch: Batch,
    topk: int,
    slots: Tensor,
    lengths: Tensor,
    first: int,
    candidates: Candidates | None,
    chunk: int,
) -> tuple[int, int, int]:
    """Refuse what :func:`select_entries` cannot read or write, metadata only; returns (rows, columns, chunks)."""
    batch.check("select_entries")
    checks.require_dimensions("scores", scores, 2, "[rows, columns]")
    checks.require_dtype("scores", scores, torch.float32)
    checks.require_rows("scores", scores)
    rows, columns = scores.shape
    checks.require_range("topk", topk, 1, MAX_INDEX_TOPK)
    checks.require_range("first", first, 0, batch.tokens - rows)
    checks.require_dtype("slots", slots, torch.int32)
    checks.require_shape("slots", slots, (rows, topk), "[rows, topk]")
    checks.require_contiguous("slots", slots)
    checks.require_dtype("lengths", lengths, torch.int32)
    checks.require_shape("lengths", lengths, (rows,), "[rows]")
    checks.require_contiguous("lengths", lengths)
    chunks = max(1, cdiv(columns, chunk))
    if chunks > 1:
        checks.require_range("topk times chunks of scores", topk * chunks, 1, MAX_CANDIDATES)
        nominated, semaphores = _check_candidates(candidates, rows, chunks, topk)
        checks.require_same_device("scores", scores, candidates=nominated, semaphores=semaphores)
    checks.require_same_device("scores", scores, slots=slots, lengths=lengths, positions=batch.positions)
    return rows, columns, chunks


def _check_candidates(candidates: Candidates | None, rows: int, chunks: int, topk: int) -> tuple[Tensor, Tensor]:
    """Refuse ``candidates`` that are missing, malformed or too small; return both tensors."""
    if candidates is None:
        raise OperandTypeError(f"candidates: expected those of {chunks} chunks, found None")
    nominated, semaphores = candidates.nominated, candidates.semaphores
    for name, tensor in (("nominated", nominated), ("semaphores", semaphores)):
        checks.require_dtype(f"candidates.{name}", tensor, torch.int32)
        checks.require_contiguous(f"candidates.{name}", tensor)
    checks.require_dimensions("candidates.nominated", nominated, 3, "[rows, 2, candidates]")
    held, _, of_each = nominated.shape
    checks.require_shape("candidates.nominated", nominated, (held, 2, of_each), "[rows, 2, candidates]")
    checks.require_shape("candidates.semaphores", semaphores, (held,), "[rows]")
    if held < rows or of_each < chunks * topk:
        raise OperandValueError(
            f"candidates: expected at least {rows} rows of {chunks * topk} candidates ({chunks} chunks), found {held} "
            f"rows of {of_each}; make them with new_candidates"
        )
    return nominated, semaphores
