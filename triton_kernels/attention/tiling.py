"""Tilings of sparse attention, and how many splits: both chosen from sizes alone (``sparse_attention``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton

from ..common import chip


@dataclass(frozen=True)
class Tiling:
    """How a program of sparse attention is laid out.

    Attributes:
        heads: heads of a program; fewer are padded. One warp group multiplies 64.
        keys: entries of a tile.
        warps, stages: Triton's ``num_warps`` and ``num_stages``.
        resident: programs that a multiprocessor holds at once, given their shared memory and registers. It must not
            exceed the true number: programs of split keys wait for one another.
        transposed: accumulate [512, heads] rather than [heads, 512].
        apart: compute logits and weights in a branch. Where the compiler sees one MMA feed another, it gives every warp
            group the whole first MMA. It does not follow values out of a branch, so it divides the logits among the
            warp groups. The weights then pass through shared memory.
        registers: limit of registers of a thread, ``None`` for no limit.
        pieces: of the 512 columns, each an MMA's: 4, of 256, 128, 64 and 64, or 8 of 64, for mma.sync. A thread holds
            its fragments of a whole piece at once, those of the query, too. The compiler is not told that the keys of
            eight pieces come from bytes; else it lays fragments out for bytes, which ldmatrix cannot fetch and whose
            loads do not run ahead.
    """

    heads: int = 64
    keys: int = 64
    warps: int = 8
    stages: int = 3
    resident: int = 1
    transposed: bool = False
    apart: bool = False
    registers: int | None = None
    pieces: int = 4


HOPPER = Tiling(stages=5, apart=True)
"""Packed entries on Hopper. Accumulators fill half of each thread's registers; 218 KiB of shared memory.

An entry's load follows that of its slot, so five stages fetch entries two tiles ahead. Three stages fetch them one tile
ahead: they are requested after the MMAs of a tile and awaited at the beginning of the next, so nothing hides their
latency. Measured on an H200, 2026-11-22, us for 64 heads and 640 keys of 2048 and 256 raw queries: 730 and 95 in five
stages, 816 and 112 in three, 849 and 113 in two."""

HOPPER_TWO_TILES = Tiling(stages=3, apart=True)
"""Packed entries on Hopper, at most two tiles for each program; see :func:`choose_tiling`."""

HOPPER_PLAIN = Tiling(apart=True)
"""bf16 rows on Hopper: shared memory does not hold two tiles of them ahead."""

BLACKWELL = Tiling(stages=2, transposed=True)
"""Packed entries on Blackwell. With 64 heads as rows, the accumulators would take all 512 columns of tensor memory and
leave none for the logits; with heads as columns they take 256."""

BLACKWELL_PLAIN = Tiling(stages=1, transposed=True)
"""bf16 rows on Blackwell: shared memory does not hold two stages of them beside the query."""


SIXTEEN_HEADS = Tiling(heads=16, keys=32, warps=4, resident=2)
"""Up to 16 heads, as a tensor-parallel rank has them: MMA instructions of 16 rows, 53 KiB of shared memory. Padded to
64 rows, 16 heads would take the tensor cores as long as 64."""


THIRTY_TWO_HEADS = Tiling(heads=32, keys=32, warps=4, stages=3, resident=2, pieces=8)
"""17 to 32 heads, as a rank of two has them of 64: mma.sync without padding. 81 KiB of shared memory; accumulators fill
half of each thread's registers. Not measured yet."""

THIRTY_TWO_HEADS_EIGHT_WARPS = Tiling(heads=32, keys=32, warps=8, stages=1, resident=2, registers=128, pieces=8)
"""The same in twice the warps, to hide latency by; nothing is fetched ahead, for which 128 registers have no room. Not
measured yet."""

SIXTEEN_HEADS_AHEAD = Tiling(heads=16, keys=32, warps=4, stages=3, resident=2, pieces=8)
"""``SIXTEEN_HEADS`` in eight pieces, so that entries are fetched two tiles ahead. Not measured yet."""

UP_TO_THIRTY_TWO_HEADS = HOPPER
"""Packed entries of 17 to 32 heads on Hopper. ``launch/bench_attention_tilings`` times the candidates."""


def default_tiling(heads: int, *, packed: bool) -> Tiling:
    """Return the tiling for ``heads`` heads of packed entries or bf16 rows on the architecture Triton compiles for."""
    if heads <= SIXTEEN_HEADS.heads:
        return SIXTEEN_HEADS
    if chip.is_before_blackwell():
        if packed and heads <= THIRTY_TWO_HEADS.heads:
            return UP_TO_THIRTY_TWO_HEADS
        return HOPPER if packed else HOPPER_PLAIN
    return BLACKWELL if packed else BLACKWELL_PLAIN


def fuses_quantization(heads: int, groups: int) -> bool:
    """Whether attention itself quantises an output of ``heads`` heads in ``groups`` groups.

    It does, for any number of queries and keys, if the heads of a program are whole groups in every tiling. Otherwise
    ``quantize.quantize`` takes the bf16 output, [T, G, K]: one launch more, the same bits.
    """
    return groups > 0 and heads % groups == 0 and SIXTEEN_HEADS.heads % (heads // groups) == 0


MAX_COUNTED_TILES = 128
"""Tiles of ``SIXTEEN_HEADS`` that :func:`choose_tiling` counts at most. HCA's slot list is as wide as the longest
context has entries, but mostly few of its columns count."""


def choose_tiling(queries: int, heads: int, columns: Sequence[int], processors: int, *, packed: bool) -> Tiling:
    """Choose the tiling of a launch from its sizes alone; the arguments are those of :func:`choose_splits`.

    Few queries of many heads go to programs of 16 heads each, as long as each program has two tiles at most and the
    chip holds all programs at once: more of the chip then works on them. Measured on an H200, 2026-11-22, in us,
    programs of 16 heads against the default tiling. Within these limits: 64 heads of 4 queries with 640 keys 14.3
    against 16.2, of 16 queries with 128 keys 12.0 against 14.1, of 32 with 128 12.3 against 14.1; 128 heads of 1 query
    with 1152 keys 15.1 against 18.2. Beyond them: 64 heads of 8 queries with 640 keys 18.4 against 17.5, of 64 with 128
    18.7 against 14.2.

    Programs of one or two tiles have nothing to fetch two tiles ahead; if there are few of them, they begin sooner with
    three stages: 13.5 us against 14.2 for 64 heads of 64 queries with 128 keys. For 256 queries, more programs than
    places, 32.7 against 32.2. The bits are the same.
    """
    queries = triton.next_power_of_2(queries)
    tiles = min(sum(triton.cdiv(width, SIXTEEN_HEADS.keys) for width in columns), MAX_COUNTED_TILES)
    programs = queries * triton.cdiv(heads, SIXTEEN_HEADS.heads) * triton.cdiv(tiles, 2)
    if programs <= processors * SIXTEEN_HEADS.resident:
        return SIXTEEN_HEADS
    tiling = default_tiling(heads, packed=packed)
    tiles = sum(triton.cdiv(width, tiling.keys) for width in columns)
    if tiling == HOPPER and tiles <= 2 and queries * triton.cdiv(heads, tiling.heads) <= processors:
        return HOPPER_TWO_TILES
    return tiling


def most_splits(queries: int, heads: int, processors: int, tiling: Tiling) -> int:
    """Return how many splits of each query the chip holds at once: programs of split keys wait for one another."""
    return max(processors * tiling.resident // max(queries * triton.cdiv(heads, tiling.heads), 1), 1)


MAX_POWER_OF_TWO_SPLITS = 16
"""Up to here :func:`choose_splits` rounds up to a power of two. More splits than needed paid up to 16; 33 rather than
18 did not (128 heads of one query, 1152 keys)."""


def choose_splits(queries: int, heads: int, columns: Sequence[int], processors: int, tiling: Tiling = HOPPER) -> int:
    """Choose the number of splits of each query's keys from sizes alone, so that a CUDA graph can capture the launch.

    The cost of a split is the number of tiles that a program walks, plus two tiles' time to store its part and add it
    later. The cheapest number of splits is taken, the smallest among equals, never more than :func:`most_splits`. Up to
    ``MAX_POWER_OF_TWO_SPLITS`` it is rounded up to a power of two, if there are so many tiles and places, because the
    number of programs that add parts is a power of two. Measured on an H200, 2026-11-22, us: 64 heads of 16 queries
    with 640 keys 20.1 in 8 splits, 23.2 in 5; 128 of 8 with 1152, 24.0 in 8, 28.4 in 6; 64 of 4 with 640 in programs of
    16 heads, 14.3 in 16, 15.0 in 10.

    The number of queries is rounded up to a power of two. The number of splits sets the order of the sums, so it
    decides the last bits of a result; with the rounding it is the same for 3 queries run as they are and in a graph
    captured for 4, as long as graphs are captured for the powers of two among their sizes. At worst, just above a power
    of two that fills the chip, a split that would have paid is missed.

    Args:
        queries: T.
        heads: of each query.
        columns: widths of the slot lists. Like the queries they decide the splits: give the graph and the eager step
            the same widths.
        processors: multiprocessors of the chip.
        tiling: the launch's.
    """
    max_splits = most_splits(triton.next_power_of_2(queries), heads, processors, tiling)
    tiles = sum(triton.cdiv(width, tiling.keys) for width in columns)
    max_splits = max(min(tiles, max_splits), 1)
    splits = min(range(1, max_splits + 1), key=lambda splits: (triton.cdiv(tiles, splits) + 2 * (splits > 1), splits))
    rounded_up = triton.next_power_of_2(splits)
    return rounded_up if rounded_up <= min(max_splits, MAX_POWER_OF_TWO_SPLITS) else splits
