"""Select the topk best of the scores that one program holds: a row's, a chunk's, or the candidates of a row's chunks.

:mod:`.topk` says how rows become programs. A program is written for single threads (:mod:`..common.threads`). It finds
a bound that topk or a few more of the maxima of groups reach, and keeps the entries that reach it. Among those a
histogram of linear bins has one bin with the topk-th largest score; the few scores in that bin are compared with each
other. The chosen entries become bits in shared memory. The number of bits before an entry's is the place of what is
stored of it, so that is in the order of the entries.

Where too many or too few entries reach the bound, or too many scores are equal to the topk-th, the program counts all
scores again in a loop.
"""

# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005, SIM102 -- a kernel has tuples grow by +, and decides what is constexpr apart

from __future__ import annotations

import triton
import triton.language as tl

from ..common.overlap import after_previous
from ..common.rounding import INTERPRETED
from ..common.threads import (
    any_left,
    barrier,
    counts_before,
    extremes,
    global_store,
    load_four,
    lowest,
    new_shared,
    ones,
    reaching,
    rounds_of,
    shared_add,
    shared_load,
    shared_load_pair,
    shared_or,
    shared_store,
    shared_store_pair,
    shared_take,
    thread,
    width,
)
from .scores import visible_entries

ABSENT_KEY = tl.constexpr(-0x80000000)
"""Key of a place without a score, below the key of every score."""
BINS = tl.constexpr(512)
"""Bins of a histogram."""
MEMBERS = tl.constexpr(64)
"""Scores at most that are compared with each other."""

HISTOGRAM = tl.constexpr(0)
TOTALS = tl.constexpr(512)
ANSWER = tl.constexpr(576)
TAKEN = tl.constexpr(578)
LIST = tl.constexpr(580)
BITS = tl.constexpr(708)
KEPT = tl.constexpr(1732)
"""Words of shared memory: bins, sums of warps, a bin, the length of the list, the list, bits and sums, kept indices."""


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


@triton.jit
def _bin_of(k, shared, THREADS: tl.constexpr):
    """Find the bin of the k-th counted number, and clear all bins: (bin, numbers in earlier bins, in it, in all)."""
    EACH: tl.constexpr = BINS // THREADS
    begin = thread(THREADS) * EACH
    barrier()
    counts = ()
    own = begin * 0
    for place in tl.static_range(EACH):
        count = shared_load(shared, begin + place + HISTOGRAM)
        shared_store(shared, begin + place + HISTOGRAM, begin * 0, begin >= 0)
        counts = counts + (count,)
        own += count
    before, total = counts_before(own, shared, TOTALS, THREADS)
    for place in tl.static_range(EACH):
        until = before + counts[place]
        holds = (before < k) & (until >= k)
        if place == 0:
            # None holds it if fewer than k are counted.
            holds = holds | ((begin == 0) & (total < k))
        shared_store_pair(shared, ANSWER, before, ((begin + place) << 16) | counts[place], holds)
        before = until
    barrier()
    earlier, both = shared_load_pair(shared, ANSWER)
    return both >> 16, earlier, both & 0xFFFF, total


@triton.jit
def _spread(numbers, low, high, shared, COUNT: tl.constexpr):
    """Count the numbers that are not NaN in bins linear in them, the highest in bin 0. Return each number's bin."""
    scale = tl.where(high > low, 1.0 / (high - low) * (BINS - 1), 0.0)
    bins = ()
    for number in tl.static_range(COUNT):
        place = tl.minimum(tl.maximum((high - numbers[number]) * scale, 0.0), BINS - 1.0).to(tl.int32)
        shared_add(shared, place + HISTOGRAM, place * 0 + 1, numbers[number] == numbers[number])
        bins = bins + (tl.where(numbers[number] == numbers[number], place, BINS),)
    return bins


@triton.jit
def _shift(span):
    """Return the shift, uint32, that maps the distances 0 to ``span`` (uint32) to bins."""
    return tl.maximum(width(span) - 9, 0).to(tl.uint32)


@triton.jit
def _split(numbers, bins, bin, k, inside, MOST: tl.constexpr, shared, COUNT: tl.constexpr, THREADS: tl.constexpr):
    """Divide the bin that holds the k-th of its numbers until it holds no more than MOST, or equal ones."""
    keys = ()
    least, most = 0x7FFFFFFF, ABSENT_KEY
    for number in tl.static_range(COUNT):
        key = tl.where(bins[number] == bin, ordered_keys(numbers[number]), ABSENT_KEY)
        least = tl.minimum(least, tl.where(bins[number] == bin, key, 0x7FFFFFFF))
        most = tl.maximum(most, key)
        keys = keys + (key,)
    low, high = extremes(least, most, shared, TOTALS, THREADS)
    barrier()
    span = (high - low).to(tl.uint32)
    while (inside > MOST) & (inside != k) & (span > 0):
        shift = _shift(span)
        for number in tl.static_range(COUNT):
            distance = (high - keys[number]).to(tl.uint32)
            place = (distance >> shift).to(tl.int32)
            shared_add(shared, place + HISTOGRAM, place * 0 + 1, distance <= span)
        of_span, earlier, inside, _ = _bin_of(k, shared, THREADS)
        k -= earlier
        begin = of_span.to(tl.uint32) << shift
        high -= begin.to(tl.int32)
        span = tl.minimum((tl.full((), 1, tl.uint32) << shift) - 1, span - begin)
    divided = ()
    for number in tl.static_range(COUNT):
        of_bin = bins[number] == bin
        above = (bins[number] < bin) | (of_bin & (keys[number] > high))
        within = of_bin & ((high - keys[number]).to(tl.uint32) <= span)
        divided = divided + (tl.where(above, -1, tl.where(within, 0, 1)),)
    return divided, bin * 0, k, inside


@triton.jit
def _divide(numbers, low, high, k, slack, MOST: tl.constexpr, shared, COUNT: tl.constexpr, THREADS: tl.constexpr):
    """Divide numbers into bins: (bins, the one of the k-th largest, its place among that bin's, how many these are).

    A number is among the k largest if its bin is an earlier one. NaN counts as absent. low, high: the least and the
    largest fp32 number. Where fewer than k numbers are there, the last value is 0.
    """
    bins = _spread(numbers, low, high, shared, COUNT)
    bin, earlier, inside, total = _bin_of(k, shared, THREADS)
    k -= earlier
    if total < k + earlier:
        inside = 0
    if (inside > MOST) & (inside > k + slack):
        bins, bin, k, inside = _split(numbers, bins, bin, k, inside, MOST, shared, COUNT, THREADS)
    return bins, bin, k, inside


@triton.jit
def _range(numbers, shared, COUNT: tl.constexpr, THREADS: tl.constexpr):
    """Return the least and the largest fp32 number that is not NaN."""
    least, most = 0x7FFFFFFF, ABSENT_KEY
    for number in tl.static_range(COUNT):
        key = ordered_keys(numbers[number])
        least = tl.minimum(least, tl.where(numbers[number] == numbers[number], key, 0x7FFFFFFF))
        most = tl.maximum(most, key)
    low, high = extremes(least, most, shared, TOTALS, THREADS)
    return score_of(low), score_of(high)


@triton.jit
def _narrow(
    source,
    count,
    shared,
    TOPK: tl.constexpr,
    KEPT_MAX: tl.constexpr,
    PARTS: tl.constexpr,
    THREADS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Keep the indices of TOPK to KEPT_MAX of the largest of ``count`` scores in shared memory, in any order.

    Returns (a bound that they reach, the largest score, how many reach it); of another number nothing is kept.
    """
    me = thread(THREADS)
    full = count // 4
    numbers = ()
    for part in tl.static_range(PARTS):
        four = part * THREADS + me
        numbers = numbers + load_four(source + 4 * four, four < full, ALIGNED)
    # Up to three scores behind the last four.
    is_last = me < count - 4 * full
    last = tl.load(source + 4 * full + me, mask=is_last, other=float("nan"))
    # If the maxima of k groups reach a bound, at least k scores do. A group's scores lie far apart in the row, because
    # neighbours often score alike.
    maxima = ()
    for group in tl.static_range(4):
        largest = numbers[group]
        for part in tl.static_range(1, PARTS):
            largest = tl.maximum(largest, numbers[4 * part + group])
        if group == 0:
            largest = tl.maximum(largest, last)
        maxima = maxima + (largest,)
    low, high = _range(maxima, shared, 4, THREADS)
    bins, bin, _, inside = _divide(maxima, low, high, TOPK, TOPK // 8, TOPK // 8, shared, 4, THREADS)
    least = 0x7FFFFFFF
    for group in tl.static_range(4):
        least = tl.minimum(least, tl.where(bins[group] <= bin, ordered_keys(maxima[group]), 0x7FFFFFFF))
    bound, _ = extremes(least, least, shared, TOTALS, THREADS)
    bound = score_of(bound)
    WORD: tl.constexpr = min(8, PARTS)
    reached = tl.where(last >= bound, 1, 0)
    words = ()
    for word in tl.static_range(PARTS // WORD):
        bits = reaching(numbers[32 * word : 32 * word + 4 * WORD], bound, 4 * WORD)
        reached += ones(bits)
        words = words + (bits,)
    barrier()
    place, kept = counts_before(reached, shared, TOTALS, THREADS)
    kept = tl.where(inside > 0, kept, 0)
    if (kept >= TOPK) & (kept <= KEPT_MAX):
        for word in tl.static_range(PARTS // WORD):
            bits = words[word]
            while any_left(bits != 0):
                number = lowest(bits)
                index = (number & 3) + 4 * me + (number >> 2) * (4 * THREADS) + word * (32 * THREADS)
                shared_store(shared, place + KEPT, index, bits != 0)
                place += tl.where(bits != 0, 1, 0)
                bits &= bits - 1
        shared_store(shared, place + KEPT, 4 * full + me, last >= bound)
    barrier()
    return bound, high, kept


@triton.jit
def _set_bit(shared, index, mask):
    """Note that the entry at ``index`` is chosen, where the mask says so."""
    shared_or(shared, 2 * (index >> 5) + BITS, tl.full((), 1, tl.int32) << (index & 31), mask)


@triton.jit
def _early_scores(source, columns, KEPT_MAX: tl.constexpr, THREADS: tl.constexpr):
    """Load a row's scores, KEPT_MAX at most, seen or not: so they come while the row's position does."""
    numbers = ()
    for held in tl.static_range(KEPT_MAX // THREADS):
        index = held * THREADS + thread(THREADS)
        numbers = numbers + (tl.load(source + index, mask=index < columns, other=float("nan")),)
    return numbers


@triton.jit
def _result(index, known, given, taken):
    """Return what is stored of the score at ``index``: its entry if it is nominated, else its entry's slot."""
    _, entries, begin = given
    table, _, _, nominate = taken
    entry = begin + index
    if entries is not None:
        entry = tl.load(entries + index, mask=known, other=0)
    if nominate is None:
        return entry_slot(table, entry, known)
    else:
        return tl.where(nominate, entry, entry_slot(table, entry, known & (nominate == 0)))


@triton.jit
def _store(place, result, number, taken, mask):
    """Store a chosen score's result at its place, and the score beside it if it is nominated."""
    _, slots, nominated, nominate = taken
    if nominate is None:
        global_store(slots + place, result, mask)
    else:
        of_scores, of_entries = nominated
        global_store(tl.where(nominate, of_entries, slots) + place, result, mask)
        global_store(of_scores + place, number.to(tl.int32, bitcast=True), mask & nominate)


@triton.jit
def _select_quickly(
    numbers,
    given,
    count,
    taken,
    shared,
    TOPK: tl.constexpr,
    KEPT_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store the results of the TOPK best of ``count`` scores, more than TOPK; return whether it could.

    numbers: the scores, where BLOCK is no more than KEPT_MAX and they have been loaded, else ().
    """
    HELD: tl.constexpr = KEPT_MAX // THREADS
    WORDS: tl.constexpr = BLOCK // 32
    EACH: tl.constexpr = max(1, WORDS // THREADS)
    LOADED: tl.constexpr = len(numbers) > 0
    source, _, _ = given
    me = thread(THREADS)
    for place in tl.static_range(BINS // THREADS):
        shared_store(shared, place * THREADS + me + HISTOGRAM, me * 0, me >= 0)
    for place in tl.static_range(EACH):
        word = place * THREADS + me
        shared_store(shared, 2 * word + BITS, me * 0, word < WORDS)
    shared_store(shared, TAKEN, me * 0, me == 0)
    low, high, kept = 0.0, 0.0, count
    if BLOCK > KEPT_MAX:
        if count > KEPT_MAX:
            low, high, kept = _narrow(source, count, shared, TOPK, KEPT_MAX, BLOCK // (4 * THREADS), THREADS, ALIGNED)
    done = (kept >= TOPK) & (kept <= KEPT_MAX)
    if done:
        held_numbers = ()
        indices = ()
        results = ()
        for held in tl.static_range(HELD):
            index = held * THREADS + me
            known = index < kept
            if BLOCK > KEPT_MAX:
                if count > KEPT_MAX:
                    index = shared_load(shared, tl.where(known, index, 0) + KEPT)
            if LOADED:
                number = tl.where(known, numbers[held], float("nan"))
            else:
                number = tl.load(source + index, mask=known, other=float("nan"))
            held_numbers = held_numbers + (number,)
            results = results + (_result(index, known, given, taken),)
            indices = indices + (index,)
        if count <= KEPT_MAX:
            low, high = _range(held_numbers, shared, HELD, THREADS)
        bins, bin, k, inside = _divide(held_numbers, low, high, TOPK, 0, MEMBERS, shared, HELD, THREADS)
        done = (inside == k) | ((inside > 0) & (inside <= MEMBERS))
        if done:
            for held in tl.static_range(HELD):
                of_bin = bins[held] == bin
                listed = of_bin & (inside != k)
                at = shared_take(shared, TAKEN, me * 0 + 1, listed)
                bits = held_numbers[held].to(tl.int32, bitcast=True)
                shared_store_pair(shared, 2 * at + LIST, bits, indices[held], listed)
                _set_bit(shared, indices[held], (bins[held] < bin) | (of_bin & (inside == k)))
            if inside != k:
                barrier()
                mine = me < inside
                bits, index = shared_load_pair(shared, 2 * tl.where(mine, me, 0) + LIST)
                number, rank = bits.to(tl.float32, bitcast=True), me * 0
                for other in range(rounds_of(inside, mine)):
                    other_bits, other_index = shared_load_pair(shared, 2 * other + LIST)
                    other_number = other_bits.to(tl.float32, bitcast=True)
                    before = (other_number > number) | ((other_number == number) & (other_index < index))
                    rank += tl.where(before, 1, 0)
                _set_bit(shared, index, mine & (rank < k))
            barrier()
            counts = ()
            own = me * 0
            for nth in tl.static_range(EACH):
                word = me * EACH + nth
                in_row = word < WORDS
                count_of_word = ones(tl.where(in_row, shared_load(shared, 2 * tl.where(in_row, word, 0) + BITS), 0))
                own += count_of_word
                counts = counts + (count_of_word,)
            before, _ = counts_before(own, shared, TOTALS, THREADS)
            for nth in tl.static_range(EACH):
                shared_store(shared, 2 * (me * EACH + nth) + (BITS + 1), before, me * EACH + nth < WORDS)
                before += counts[nth]
            barrier()
            for held in tl.static_range(HELD):
                known = held * THREADS + me < kept
                bits, begin = shared_load_pair(shared, 2 * tl.where(known, indices[held] >> 5, 0) + BITS)
                bit = tl.full((), 1, tl.int32) << (indices[held] & 31)
                chosen = known & ((bits & bit) != 0)
                _store(begin + ones(bits & (bit - 1)), results[held], held_numbers[held], taken, chosen)
    return done


@triton.jit
def _select_slowly(given, count, taken, shared, TOPK: tl.constexpr, THREADS: tl.constexpr):
    """Store the results of the TOPK best of ``count`` scores, more than TOPK, whatever they are."""
    source, _, _ = given
    me = thread(THREADS)
    barrier()
    for nth in tl.static_range(BINS // THREADS):
        shared_store(shared, nth * THREADS + me + HISTOGRAM, me * 0, me >= 0)
    barrier()
    k, inside, high = tl.full((), TOPK, tl.int32), count, tl.full((), 0x7FFFFFFF, tl.int32)
    span = tl.full((), 0xFFFFFFFE, tl.uint32)
    while (inside != k) & (span > 0):
        shift = _shift(span)
        for begin in range(0, count, THREADS):
            index = begin + me
            key = ordered_keys(tl.load(source + index, mask=index < count, other=0.0))
            distance = (high - key).to(tl.uint32)
            place = (distance >> shift).to(tl.int32)
            shared_add(shared, place + HISTOGRAM, place * 0 + 1, (index < count) & (distance <= span))
        bin, earlier, inside, _ = _bin_of(k, shared, THREADS)
        k -= earlier
        first = bin.to(tl.uint32) << shift
        high -= first.to(tl.int32)
        span = tl.minimum((tl.full((), 1, tl.uint32) << shift) - 1, span - first)
    larger, equal = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for begin in range(0, count, THREADS):
        index = begin + me
        known = index < count
        number = tl.load(source + index, mask=known, other=0.0)
        key = ordered_keys(number)
        above, within = known & (key > high), known & ((high - key).to(tl.uint32) <= span)
        before, total = counts_before(tl.where(above, 1, 0) + tl.where(within, 0x10000, 0), shared, TOTALS, THREADS)
        rank = equal + (before >> 16)
        place = larger + (before & 0xFFFF) + tl.minimum(rank, k)
        _store(place, _result(index, known, given, taken), number, taken, above | (within & (rank < k)))
        larger += total & 0xFFFF
        equal += total >> 16
        barrier()


@triton.jit
def _store_all(given, count, taken, TOPK: tl.constexpr, THREADS: tl.constexpr):
    """Store the results of all of ``count`` scores, no more than TOPK; -1 behind the slots."""
    source, _, _ = given
    _, _, _, nominate = taken
    for part in tl.static_range((TOPK + THREADS - 1) // THREADS):
        index = part * THREADS + thread(THREADS)
        known = index < count
        result = tl.where(known, _result(index, known, given, taken), -1)
        if nominate is None:
            _store(index, result, 0.0, taken, index < TOPK)
        else:
            number = tl.load(source + index, mask=known & nominate, other=0.0)
            _store(index, result, number, taken, tl.where(nominate, known, index < TOPK))


@triton.jit
def _select(numbers, given, count, taken, shared, SIZES: tl.constexpr):
    """Store the results of the topk best of ``count`` scores, or of all if they are no more than topk.

    Args:
        numbers: as for :func:`_select_quickly`.
        given: (pointer of the scores; pointer of their entries, or None; else the entry of the first score).
        count: number of scores.
        taken: (the request's row of slots; pointer of the chosen slots; pointers of nominated scores and of nominated
            entries, or None; whether the chosen are nominated, or None if they never are).
        shared: shared memory; a barrier must precede this.
        SIZES: the last five of :func:`_select_quickly`; BLOCK is no less than ``count``.
    """
    TOPK: tl.constexpr = SIZES[0]
    THREADS: tl.constexpr = SIZES[3]
    if count <= TOPK:
        _store_all(given, count, taken, TOPK, THREADS)
    else:
        done = _select_quickly(numbers, given, count, taken, shared, *SIZES)
        if done == 0:
            _select_slowly(given, count, taken, shared, TOPK, THREADS)


@triton.jit(do_not_specialize=["first"])
def _select_kernel(
    scores, row_stride, columns, positions, owners, table, table_stride, slots, lengths, first,
    nominated, of_each, semaphores,
    TOPK: tl.constexpr, KEPT_MAX: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    ELECTED_KEPT_MAX: tl.constexpr, CANDIDATE_BLOCK: tl.constexpr, CANDIDATES_ALIGNED: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Select one chunk's best entries, and in a row's last program the best of its candidates.

    Grid: (rows, chunks). BLOCK: scores of a chunk. nominated: None where a row is one chunk, else rows of ``of_each``
    scores and as many entries. CANDIDATE_BLOCK: candidates of a row at most.
    """
    after_previous()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores += row * row_stride
    numbers = ()
    if nominated is None:
        if BLOCK <= KEPT_MAX:
            numbers = _early_scores(scores, columns, KEPT_MAX, THREADS)
    visible = visible_entries(tl.load(positions + first + row), columns)
    begin = chunk * BLOCK
    if (chunk == 0) | (visible > begin):
        slots += row * TOPK
        table += tl.load(owners + first + row) * table_stride
        if chunk == 0:
            tl.store(lengths + row, tl.minimum(visible, TOPK))
        shared = new_shared()
        sizes: tl.constexpr = (TOPK, KEPT_MAX, BLOCK, THREADS, ALIGNED)
        if nominated is None:
            taken = (table, slots, None, None)
            _select(numbers, (scores, None, 0), visible, taken, shared, sizes)
        else:
            nominated += row * (2 * of_each)
            of_chunk = nominated + chunk * TOPK
            taken = (table, slots, (of_chunk, of_chunk + of_each), visible > BLOCK)
            count = tl.minimum(visible - begin, BLOCK)
            given = (scores + begin, None, begin)
            _select((), given, count, taken, shared, sizes)
            if visible > BLOCK:
                chunks = tl.cdiv(visible, BLOCK)
                # Every thread has stored its candidates before the semaphore is incremented.
                barrier()
                if tl.atomic_add(semaphores + row, 1, sem="acq_rel", scope="gpu") == chunks - 1:
                    tl.store(semaphores + row, 0)
                    candidates = (chunks - 1) * TOPK + tl.minimum(visible - (chunks - 1) * BLOCK, TOPK)
                    of_row = (nominated.to(tl.pointer_type(tl.float32)), nominated + of_each, 0)
                    chosen = (table, slots, None, None)
                    of_candidates: tl.constexpr = (TOPK, ELECTED_KEPT_MAX, CANDIDATE_BLOCK, THREADS, CANDIDATES_ALIGNED)
                    _select((), of_row, candidates, chosen, shared, of_candidates)
