"""Scores as integers of the same order, and slots of entries: what both ways to select entries share."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.rounding import INTERPRETED

ABSENT_KEY = tl.constexpr(-0x80000000)
"""Key of a place without a score, below the key of every score."""


@triton.jit
def ordered_keys(scores):
    """Convert fp32 scores to int32 keys of the same order, all above ABSENT_KEY.

    ``~`` reverses the order, not a negation: ptxas (12.9, 13.0, 13.3) loses a negation that it merges into a maximum of
    three keys, triton-lang/triton PR 11032. With a negation rows of 4100 scores got no slots on an H200.
    """
    # The difference makes both zeros equal, and every NaN the same: on a GPU it has these bits.
    bits = (0.0 - scores).to(tl.int32, bitcast=True)
    if INTERPRETED:
        bits = tl.where(scores != scores, 0x7FFFFFFF, bits)
    return tl.maximum(~(bits ^ ((bits >> 31) & 0x7FFFFFFF)), ABSENT_KEY + 1)


@triton.jit
def score_of(key):
    """Return a score, fp32, that :func:`ordered_keys` gives this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def entry_slot(table, entry, known):
    """Return the int32 slots of a request's ratio-4 entries. table: the request's row of its pages' full slots."""
    return tl.load(table + entry // 64, mask=known, other=0) // 4 + entry % 64
