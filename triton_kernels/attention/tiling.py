"""Tilings of sparse attention, and how many splits: both chosen from sizes alone (``sparse_attention``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..common import chip
from ..common.integers import cdiv, cut, next_power_of_2


@dataclass(frozen=True)
class Tiling:
    """Layout of a program of sparse attention.

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
        pieces: of the 512 columns, each an MMA's: 4, of 256, 128, 64 and 64, or 8 of 64, for mma.sync. A thread holds
            its fragments of a whole piece at once, those of the query, too. The compiler is not told that the keys of
            eight pieces come from bytes; else it lays fragments out for bytes, which ldmatrix cannot fetch and whose
            loads do not run ahead.
        queries: neighbouring queries of a program, which has ``heads / queries`` heads of each (``query_block``).
    """

    heads: int = 64
    keys: int = 64
    warps: int = 8
    stages: int = 3
    resident: int = 1
    transposed: bool = False
    apart: bool = False
    pieces: int = 4
    queries: int = 1


HOPPER = Tiling(stages=5, apart=True)
"""Packed entries on Hopper. Accumulators fill half of each thread's registers; 218 KiB of shared memory.

An entry's load follows that of its slot, so five stages fetch entries two tiles ahead. Three stages fetch them one tile
ahead: they are requested after the MMAs of a tile and awaited at the beginning of the next, so nothing hides their
latency. Five stages take 0.89 of the time of three (``launch/results/tunings_h200.md``)."""

HOPPER_TWO_TILES = Tiling(stages=3, apart=True)
"""Packed entries on Hopper, at most two tiles for each program; see :func:`choose_tiling`."""

HOPPER_PLAIN = Tiling(apart=True)
"""bf16 rows on Hopper: shared memory does not hold two tiles of them ahead."""

BLACKWELL = Tiling(stages=2, transposed=True)
"""Packed entries on Blackwell. With 64 heads as rows, the accumulators would take all 512 columns of tensor memory and
leave none for the logits; with heads as columns they take 256."""

BLACKWELL_PLAIN = Tiling(stages=1, transposed=True)
"""bf16 rows on Blackwell: shared memory does not hold two stages of them beside the query."""


SIXTEEN_HEADS = Tiling(heads=16, keys=32, warps=4, resident=2, pieces=8)
"""Up to 16 heads, as a tensor-parallel rank has them, and few queries of more: MMA instructions of 16 rows, 64 KiB of
shared memory. Padded to 64 rows, 16 heads would take the tensor cores as long as 64. In eight pieces entries are
fetched two tiles ahead: 8.1 µs instead of 9.0 in four for a query of 32 heads with 384 keys
(``launch/results/tunings_h200.md``)."""

THIRTY_TWO_HEADS = Tiling(heads=32, keys=32, warps=4, resident=2, pieces=8)
"""17 to 32 heads of packed entries on Hopper, as a rank of two has them of 64: mma.sync without padding. 81 KiB of
shared memory; accumulators fill half of each thread's registers. 8192 queries with 136 keys take 0.64 of the time of
``HOPPER`` (``launch/results/tunings_h200.md``)."""


TWO_QUERIES, FOUR_QUERIES = (replace(HOPPER, queries=queries) for queries in (2, 4))
"""Up to 32, or 16, heads of packed entries on Hopper where a request has several queries, whose lists mostly agree."""

TWO_QUERIES_MIN_EXTRA = 16
"""Extra columns from which on two queries share a program: 0.79 of the time of ``THIRTY_TWO_HEADS`` with ratio-4
entries, 1.09 without entries (``launch/results/tunings_h200.md``). With few keys a program is mostly prologue and
epilogue, and a multiprocessor holds one program of two queries, but two of one query."""

MIN_TOGETHER = 256
"""Queries of a launch from which on neighbours share programs (:func:`shared_tiling`). At 256 sharing takes 0.75 to
0.98 of the time with 32 heads, and 1.0 to 1.2 with 16 (``launch/results/attention_tilings_h200.md``)."""


def default_tiling(heads: int, *, packed: bool) -> Tiling:
    """Return the tiling for ``heads`` heads of packed entries or bf16 rows on the architecture Triton compiles for."""
    if heads <= SIXTEEN_HEADS.heads:
        return SIXTEEN_HEADS
    if chip.is_before_blackwell():
        if packed and heads <= THIRTY_TWO_HEADS.heads:
            return THIRTY_TWO_HEADS
        return HOPPER if packed else HOPPER_PLAIN
    return BLACKWELL if packed else BLACKWELL_PLAIN


def shared_tiling(queries: int, heads: int, columns: Sequence[int], each: int | None) -> Tiling | None:
    """Return the tiling in which neighbouring queries share programs; ``None`` where each had better have its own.

    A shared program multiplies 64 rows and has a multiprocessor to itself. Of programs for one query a multiprocessor
    holds two, of 16 or 32 rows. On an H200 with 132 (``launch/results/attention_tilings_h200.md``)

    * up to 132 queries have a multiprocessor each and are done first if each has its own program;
    * up to 264 fit in one round either way, and sharing gains what it saves of a round: nothing with 16 heads, a
      quarter with 32 heads and many keys. ``MIN_TOGETHER`` is the end of this range;
    * beyond, shared programs need fewer rounds, provided that they are full: a block of four with two queries does the
      work of four, so more than half of the queries of a block must be there. 384 queries of 16 heads take 0.52 to
      0.67 of the time.

    Args:
        queries, heads, columns: as :func:`choose_tiling` takes them.
        each: queries of each request, where all have as many and blocks are cut inside requests; ``None`` in prompts.
    """
    if queries < MIN_TOGETHER:
        return None
    for tiling, extra in ((FOUR_QUERIES, 0), (TWO_QUERIES, TWO_QUERIES_MIN_EXTRA)):
        fits = heads * tiling.queries <= tiling.heads and columns[0] >= tiling.queries
        is_full = each is None or 2 * each > tiling.queries * cut(each, tiling.queries)[0]
        if fits and is_full and sum(columns[1:]) >= extra:
            return tiling
    return None


def fuses_quantization(heads: int, groups: int) -> bool:
    """Whether attention itself quantises an output of ``heads`` heads in ``groups`` groups.

    It does, for any number of queries and keys, if the heads of a program are whole groups in every tiling. Otherwise
    ``quantize.quantize`` takes the bf16 output, [T, G, K]: one launch more, the same bits.
    """
    return groups > 0 and heads % groups == 0 and SIXTEEN_HEADS.heads % (heads // groups) == 0


MAX_UNSPLIT_TILES = 8
"""Tiles of ``SIXTEEN_HEADS`` that one program may loop over where twice as many programs would not fit."""


def choose_tiling(
    queries: int,
    heads: int,
    columns: Sequence[int],
    processors: int,
    *,
    packed: bool,
    together: bool = False,
    each: int | None = None,
    expected: int | None = None,
) -> Tiling:
    """Choose the tiling of a launch from its sizes alone.

    Args:
        queries, heads, columns, processors, packed: as of :func:`choose_splits`.
        together: whether lists of neighbouring queries mostly agree (``sparse_attention``'s ``owners``), and values
            are written. If a query has few heads, neighbours then share programs, by :func:`shared_tiling`.
        each: queries of each request (``sparse_attention``'s ``tokens_each``).
        expected: columns of the second list that mostly count (``sparse_attention``'s ``expected_extra``).

    Few queries of many heads go to programs of 16 heads each, as long as each program has two tiles at most and the
    chip holds all programs at once: more of the chip then works on them. Within these limits they take 0.83 to 0.88 of
    the default tiling's time, beyond them longer (``launch/results/tunings_h200.md``).

    So do a few more queries of short lists, if a multiprocessor gets one program and no keys are split. With columns
    for a million tokens, of which 128 are expected, keys are split in two, and it is still faster.

    Programs of one or two tiles have nothing to fetch two tiles ahead. If there are few of them, they begin sooner with
    three stages. The bits are the same.

    All of this was timed on H200s (the notebook above has the times), and nothing on Blackwell.
    """
    if together and packed and chip.is_before_blackwell():
        shared = shared_tiling(queries, heads, columns, each)
        if shared is not None:
            return shared
    queries = next_power_of_2(queries)
    counted = columns if expected is None else (columns[0], *(min(width, expected) for width in columns[1:]))
    tiles = sum(cdiv(width, SIXTEEN_HEADS.keys) for width in counted)
    programs = queries * cdiv(heads, SIXTEEN_HEADS.heads) * cdiv(tiles, 2)
    if programs <= processors * SIXTEEN_HEADS.resident:
        return SIXTEEN_HEADS
    if tiles <= MAX_UNSPLIT_TILES and queries * cdiv(heads, SIXTEEN_HEADS.heads) <= processors:
        return SIXTEEN_HEADS
    tiling = default_tiling(heads, packed=packed)
    tiles = sum(cdiv(width, tiling.keys) for width in columns)
    if tiling == HOPPER and tiles <= 2 and queries * cdiv(heads, tiling.heads) <= processors:
        return HOPPER_TWO_TILES
    return tiling


def most_splits(queries: int, heads: int, processors: int, tiling: Tiling) -> int:
    """Return how many splits of each query the chip holds at once: programs of split keys wait for one another."""
    return max(processors * tiling.resident // max(queries * cdiv(heads, tiling.heads), 1), 1)


MAX_POWER_OF_TWO_SPLITS = 16
"""Up to here :func:`choose_splits` rounds up to a power of two; beyond, more splits than needed do not pay
(``launch/results/tunings_h200.md``)."""


CROWDED = 1.6
"""How much longer programs take that share a multiprocessor, fitted to 32 heads
(``launch/results/tunings_h200.md``)."""


def choose_splits(queries: int, heads: int, columns: Sequence[int], processors: int, tiling: Tiling = HOPPER) -> int:
    """Choose the number of splits of each query's keys from sizes alone, so that a CUDA graph can capture the launch.

    The cost of a split is the number of tiles that a program loops over, plus two tiles' time to store its part and add
    it later, ``CROWDED`` times as much where there are more programs than multiprocessors. The cheapest number of
    splits is taken, the smallest among equals, never more than :func:`most_splits`. Up to ``MAX_POWER_OF_TWO_SPLITS``
    it is rounded up to a power of two where that costs no more, because the number of programs that add parts is a
    power of two: 16 queries of 64 heads with 640 keys take 20.1 µs in 8 splits, 23.2 in 5.

    The number of queries is rounded up to a power of two. The number of splits sets the order of the sums, so it
    decides the last bits of a result. With the rounding, 3 queries run alone and in a graph captured for 4 have the
    same splits, as long as graphs are captured for the powers of two among their sizes. At worst, just above a power of
    two that fills the chip, a profitable split is missed.

    Args:
        queries: T.
        heads: of each query.
        columns: widths of the slot lists. Like the queries they decide the splits: give the graph and the eager step
            the same widths.
        processors: multiprocessors of the chip.
        tiling: the launch's.
    """
    queries = next_power_of_2(queries)
    max_splits = most_splits(queries, heads, processors, tiling)
    tiles = sum(cdiv(width, tiling.keys) for width in columns)
    max_splits = max(min(tiles, max_splits), 1)

    def cost(splits: int) -> float:
        is_crowded = queries * cdiv(heads, tiling.heads) * splits > processors
        return (cdiv(tiles, splits) + 2 * (splits > 1)) * (CROWDED if is_crowded else 1)

    splits = min(range(1, max_splits + 1), key=lambda splits: (cost(splits), splits))
    rounded_up = next_power_of_2(splits)
    fits = rounded_up <= min(max_splits, MAX_POWER_OF_TWO_SPLITS)
    return rounded_up if fits and cost(rounded_up) <= cost(splits) else splits
