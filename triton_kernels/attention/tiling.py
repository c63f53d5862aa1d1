"""How sparse attention is laid on a chip, from sizes alone; see ``attention``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton

from ..common.rounding import INTERPRETED


@dataclass(frozen=True)
class Tiling:
    """How the work is laid on a chip.

    Attributes:
        heads: heads of a program, fewer are padded; 64 is what one warp group multiplies.
        keys: entries at once.
        warps, stages: as Triton's.
        resident: programs that a multiprocessor holds at once, by their shared memory and registers. Never more than
            it does hold: programs of split keys wait for one another.
        transposed: accumulate [512, heads] rather than [heads, 512].
        apart: logits and weights are computed in a branch. The compiler gives a product that it sees feeding another to
            each warp group whole; what leaves a branch it does not follow, and shares the logits among the groups. The
            weights then pass through shared memory.
    """

    heads: int = 64
    keys: int = 64
    warps: int = 8
    stages: int = 3
    resident: int = 1
    transposed: bool = False
    apart: bool = False


HOPPER = Tiling(stages=5, apart=True)
"""Accumulators fill half of each thread's registers; 218 KiB of shared memory.

Five stages, since an entry follows its slot, are two tiles ahead. In three, which are one, entries are asked for after
the products of a tile and awaited at the beginning of the next: nothing hides their way. Measured on an H200,
2026-11-22, us for 64 heads and 640 keys of 2048 and 256 raw queries: 730 and 95 in five stages, 816 and 112 in three,
849 and 113 in two."""

HOPPER_SHORT = Tiling(stages=3, apart=True)
"""Two tiles at most; see :func:`choose_tiling`."""

HOPPER_PLAIN = Tiling(apart=True)
"""bf16 rows: two tiles of them ahead do not fit into shared memory."""

BLACKWELL = Tiling(stages=2, transposed=True)
"""64 heads as rows would take all 512 columns of tensor memory and leave none for the logits; as columns, 256."""

BLACKWELL_PLAIN = Tiling(stages=1, transposed=True)
"""bf16 rows: two stages of them do not fit into shared memory beside the query."""


FEW_HEADS = Tiling(heads=16, keys=32, warps=4, resident=2)
"""Up to 16 heads, as a rank has them: instructions of 16 rows, 53 KiB of shared memory; padded to 64 rows, they
would cost the tensor cores as much as for 64 heads."""


def default_tiling(heads: int, *, packed: bool) -> Tiling:
    """The tiling for so many heads of packed entries or rows of bf16, on the architecture that Triton compiles for."""
    if heads <= FEW_HEADS.heads:
        return FEW_HEADS
    if INTERPRETED.value or triton.runtime.driver.active.get_current_target().arch < 100:
        return HOPPER if packed else HOPPER_PLAIN
    return BLACKWELL if packed else BLACKWELL_PLAIN


def fuses_quantization(heads: int, groups: int) -> bool:
    """Whether attention quantises an output of so many heads in so many groups itself.

    For every number of queries and keys, as long as the heads of a program, in every tiling, are whole groups. Else
    ``quantize.quantize`` takes the bf16 output, [T, G, K]: one launch more, the same bits.
    """
    return groups > 0 and heads % groups == 0 and FEW_HEADS.heads % (heads // groups) == 0


COUNTED_TILES = 128
"""Of ``FEW_HEADS``. The list of HCA is as wide as the longest context has entries, and mostly few of them count."""


def choose_tiling(queries: int, heads: int, columns: Sequence[int], processors: int, *, packed: bool) -> Tiling:
    """The tiling for so many queries, from sizes alone; arguments as of :func:`choose_splits`.

    Few queries of many heads are dealt to programs of few heads, as long as these have two tiles each at most and all
    of them a place: more of the chip works on them. Measured on an H200, 2026-11-22, us for 64 heads of 4 queries with
    640 keys, and of 16 and 32 with 128: 14.3, 12.0 and 12.3 against 16.2, 14.1 and 14.1; 128 heads of 1 query with 1152
    keys 15.1 against 18.2. Beyond, 64 heads of 8 queries with 640 keys and of 64 with 128: 18.4 and 18.7 against 17.5
    and 14.2.

    Few programs of one tile or two have nothing to ask for two tiles ahead, and begin sooner in three stages: 13.5
    against 14.2 for 64 heads of 64 queries with 128 keys; for 256, where programs take cos_sin, 32.7 against 32.2. The
    bits are the same.
    """
    queries = triton.next_power_of_2(queries)
    tiles = min(sum(triton.cdiv(width, FEW_HEADS.keys) for width in columns), COUNTED_TILES)
    programs = queries * triton.cdiv(heads, FEW_HEADS.heads) * triton.cdiv(tiles, 2)
    if programs <= processors * FEW_HEADS.resident:
        return FEW_HEADS
    tiling = default_tiling(heads, packed=packed)
    tiles = sum(triton.cdiv(width, tiling.keys) for width in columns)
    if tiling == HOPPER and tiles <= 2 and queries * triton.cdiv(heads, tiling.heads) <= processors:
        return HOPPER_SHORT
    return tiling


def most_splits(queries: int, heads: int, processors: int, tiling: Tiling) -> int:
    """How many splits the chip can place at once: they wait for one another."""
    return max(processors * tiling.resident // max(queries * triton.cdiv(heads, tiling.heads), 1), 1)


SHARED_PARTS = 16
"""More splits than needed paid up to here; 33 rather than 18 did not (128 heads of one query, 1152 keys)."""


def choose_splits(queries: int, heads: int, columns: Sequence[int], processors: int, tiling: Tiling = HOPPER) -> int:
    """Into how many programs to split each query's keys, from sizes alone, so that a CUDA graph may hold the launch.

    Counts the tiles that a program walks, plus two tiles' time to store the part and add it later. The fewest splits
    among equals; never more than :func:`most_splits`. Up to ``SHARED_PARTS``, the next power of two instead where there
    are so many tiles and places: as many programs add parts as is a power of two. Measured on an H200, 2026-11-22, us:
    64 heads of 16 queries with 640 keys 20.1 in 8 splits, 23.2 in 5; 128 of 8 with 1152, 24.0 in 8, 28.4 in 6; 64 of 4
    with 640 in programs of few heads, 14.3 in 16, 15.0 in 10.

    The queries are counted as the next power of two. The number of splits orders the sums, so it decides the last bits
    of a result; this way it is the same for 3 queries run as they are and in a graph captured for 4, as long as graphs
    are captured for the powers of two among their sizes. At worst, just above a power of two that fills the chip, a
    split is missed that would have paid.

    Args:
        columns: widths of the slot lists. They count as the queries do: give graph and eager step the same.
        processors: multiprocessors of the chip.
    """
    most = most_splits(triton.next_power_of_2(queries), heads, processors, tiling)
    tiles = sum(triton.cdiv(width, tiling.keys) for width in columns)
    most = max(min(tiles, most), 1)
    splits = min(range(1, most + 1), key=lambda splits: (triton.cdiv(tiles, splits) + 2 * (splits > 1), splits))
    shared = triton.next_power_of_2(splits)
    return shared if shared <= min(most, SHARED_PARTS) else splits
