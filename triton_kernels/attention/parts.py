"""Split attention: the programs that made a query's parts add them up, within the launch of ``kernel.attend``.

Where keys are split, each program of a query's block of heads stores its part, increments a semaphore, waits until all
parts are stored, and adds its share: some columns of all parts, in a fixed order. No result depends on the order in
which programs run.

Where the output is quantised, a row scale spans all columns of a group of heads. So each program stores the largest
magnitudes of its share beside the parts' statistics, increments the semaphore once more and waits until all programs
with a share have done so. Then each quantises the share that it holds. Only these few numbers pass between programs,
and no program has the work of a whole group, as the last to finish would have if it read what the others stored.

Waiting cannot block the device as long as all programs of the launch have a place on the chip at once:
``tiling.most_splits`` bounds the splits accordingly. No other launch that waits may run beside it. Programs without a
part have exited.

Semaphores: int32, one for each query and block of heads. A semaphore first counts the parts that are stored, then, if
the output is quantised, the programs whose maxima are stored, then the programs that have finished waiting. The last of
those resets it to zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.rope import rotate
from ..common.rounding import INTERPRETED, product, round_for
from ..common.semaphores import count_out, wait_for
from .quantized_output import group_scales, head_maxima, rounded, store_group_scales, store_quantized

LOG2_E = tl.constexpr(1.4426950408889634)
PART_VALUES_PER_THREAD = tl.constexpr(64)
"""fp32 values of parts that a thread loads at once: as many as hide the latency of L2 and still fit its registers."""
MAX_HALVINGS = tl.constexpr(5)
"""The 512 columns are halved at most this often: shares of 16 columns fill half of a cache line in each row."""


@triton.constexpr_function
def _parts_at_once(heads, warps, columns):
    """Number of parts that a program loads at once."""
    return max(1, PART_VALUES_PER_THREAD.value * warps * 32 // heads // columns)


@triton.jit
def add_parts(
    values,
    stats,
    sink,
    cos_sin,
    out,
    rows,
    semaphores,
    token,
    first_head,
    heads,
    split,
    part_count,
    splits,
    HAS_COS_SIN: tl.constexpr,
    HEADS: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Wait until all parts are stored; then add, and store, this program's share of the output of HEADS heads.

    Programs ``split < part_count`` call it, after storing their parts. The columns are halved into as many shares as
    possible, 2 to 2^MAX_HALVINGS, without there being more shares than parts.

    Args:
        values, stats: ``sparse_attention.Partials``.
        sink: fp32 [heads].
        cos_sin: fp32 [T, 64]; read if HAS_COS_SIN: rotate the last 64 columns back.
        out: bf16 [T, heads, 512], or ``None``.
        rows: ``quantize.rows.RowsArguments`` of groups of GROUP heads; empty where the output is not quantised.
        semaphores: address of this block's semaphore.
        token: int64, the query. first_head: the block's first head. heads: of a query.
        split: this program's number. part_count: number of parts. splits: number of programs.
    """
    # Every thread has stored its piece of the part before the semaphore is incremented.
    tl.debug_barrier()
    arrived = tl.atomic_add(semaphores, 1, sem="acq_rel", scope="gpu") + 1
    shares = 2
    for halvings in tl.static_range(2, MAX_HALVINGS + 1):
        shares = tl.where(part_count >= (1 << halvings), 1 << halvings, shares)
    if INTERPRETED:
        # The interpreter runs one program after another: the last one adds all shares.
        if arrived < part_count:
            return
        tl.store(semaphores, 0)
        share, share_step = 0, 1
    else:
        # Some programs have no share: shares are a power of two, parts may be more.
        if split >= shares:
            return
        if arrived < part_count:
            wait_for(semaphores, part_count)
        if len(rows) == 0:
            count_out(semaphores, part_count + tl.minimum(part_count, shares) - 1)
        share, share_step = split, part_count
    block = (values, stats, sink, cos_sin, token, first_head, heads, part_count, splits)
    for halvings in tl.static_range(1, MAX_HALVINGS + 1):
        if shares == (1 << halvings):
            if len(rows) > 0:
                _quantize_shares(
                    *(block, out, rows, semaphores, share, share_step),
                    *(HAS_COS_SIN, HEADS, 512 >> halvings, _parts_at_once(HEADS, WARPS, 512 >> halvings), GROUP),
                )
            else:
                for begin in range(share * (512 >> halvings), 512, share_step * (512 >> halvings)):
                    total = _add_share(
                        block,
                        begin,
                        *(HAS_COS_SIN, HEADS, 512 >> halvings, _parts_at_once(HEADS, WARPS, 512 >> halvings), 2),
                    )
                    _store_columns(total, out, token, first_head, heads, begin)


@triton.jit
def _quantize_shares(
    block,
    out,
    rows,
    semaphores,
    share,
    share_step,
    HAS_COS_SIN: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add, quantise and store share number ``share`` of COLUMNS columns; in the interpreter all others, too.

    A program holds its share in registers while it waits for the maxima of the others. It has one share only, as there
    are at least as many parts as shares. In the interpreter the last program has all shares, every ``share_step``-th
    from ``share`` on, and adds each up twice. PARTS: parts loaded at once. ``block``: see ``_add_share``.
    """
    _, stats, _, _, token, first_head, heads, part_count, splits = block
    SHARES: tl.constexpr = 512 // COLUMNS
    total = _add_share(block, share * COLUMNS, HAS_COS_SIN, HEADS, COLUMNS, PARTS, 3)
    _store_columns(total, out, token, first_head, heads, share * COLUMNS)
    total = rounded(total)
    maxima = head_maxima(total)
    if INTERPRETED:
        for other in range(share + share_step, SHARES, share_step):
            others = _add_share(block, other * COLUMNS, HAS_COS_SIN, HEADS, COLUMNS, PARTS, 3)
            _store_columns(others, out, token, first_head, heads, other * COLUMNS)
            maxima = tl.maximum(maxima, head_maxima(rounded(others)))
    head = first_head + tl.arange(0, HEADS)
    maxima_row = stats + (token * heads + head) * (splits * 3) + 2
    tl.store(maxima_row + share * 3, maxima, mask=head < heads)
    # Every thread has stored its maxima before the semaphore is incremented, or before the program reads them.
    tl.debug_barrier()
    if not INTERPRETED:
        arrived = tl.atomic_add(semaphores, 1, sem="acq_rel", scope="gpu") + 1
        if arrived < part_count + SHARES:
            wait_for(semaphores, part_count + SHARES)
        count_out(semaphores, part_count + 2 * SHARES - 1)
    # Bypass L1: other programs stored these during this launch.
    maxima_address = maxima_row[:, None] + tl.arange(0, 1 if INTERPRETED else SHARES)[None, :] * 3
    maxima = tl.load(maxima_address, mask=(head < heads)[:, None], other=0.0, cache_modifier=".cg")
    scales = group_scales(tl.max(maxima, axis=1), GROUP)
    if share == 0:
        store_group_scales(scales, rows, token, first_head, heads, GROUP)
    store_quantized(total, scales, rows, token, first_head, heads, share * COLUMNS, GROUP)
    if INTERPRETED:
        for other in range(share + share_step, SHARES, share_step):
            others = _add_share(block, other * COLUMNS, HAS_COS_SIN, HEADS, COLUMNS, PARTS, 3)
            store_quantized(rounded(others), scales, rows, token, first_head, heads, other * COLUMNS, GROUP)


@triton.jit
def _store_columns(total, out, token, first_head, heads, begin):
    """Store columns from ``begin`` on to bf16 rows ``out``; ``None`` where none are wanted."""
    if out is not None:
        head = first_head + tl.arange(0, total.shape[0])
        column = begin + tl.arange(0, total.shape[1])
        row = token * heads + head
        tl.store(out + row[:, None] * 512 + column[None, :], round_for(total, out), mask=(head < heads)[:, None])


@triton.jit
def _add_share(
    block,
    begin,
    HAS_COS_SIN: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    STATS: tl.constexpr,
):
    """Add COLUMNS columns of the output from ``begin`` on, over all parts: fp32 [HEADS, COLUMNS].

    PARTS parts are loaded at a time. STATS: numbers of a part's stats. ``block``: :func:`add_parts`' arguments that say
    which parts are added and what is done to the sum, in the order below.
    """
    values, stats, sink, cos_sin, token, first_head, heads, part_count, splits = block
    head = first_head + tl.arange(0, HEADS)
    head_mask = head < heads
    row = token * heads + head
    column = begin + tl.arange(0, COLUMNS)
    # Rounded as in the parts, whose maximum it may be: when this product was fused with the subtraction of that
    # maximum, the rounding error was left over, and gave NaN for a sink of 1e30.
    sink_log2 = product(tl.load(sink + head, mask=head_mask, other=0.0), LOG2_E)
    if HAS_COS_SIN:
        # Loaded ahead of the parts, so that both arrive together. Pairs before the last 32 get cos 1 and sin 0.
        pair = begin // 2 + tl.arange(0, COLUMNS // 2) - 224
        cos_sin_address = cos_sin + token * 64 + pair * 2
        cos = tl.load(cos_sin_address, mask=pair >= 0, other=1.0)
        sin = tl.load(cos_sin_address + 1, mask=pair >= 0, other=0.0)
    running_max = sink_log2
    denominator = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, COLUMNS), tl.float32)
    for start in tl.range(0, part_count, PARTS, num_stages=1):
        part = start + tl.arange(0, PARTS)
        part_mask = (part < part_count)[:, None] & head_mask[None, :]
        part_row = row[None, :] * splits + part[:, None]
        # Bypass L1: other programs stored these during this launch.
        part_maxima = tl.load(stats + part_row * STATS, mask=part_mask, other=float("-inf"), cache_modifier=".cg")
        part_sums = tl.load(stats + part_row * STATS + 1, mask=part_mask, other=0.0, cache_modifier=".cg")
        address = values + part_row[:, :, None] * 512 + column[None, None, :]
        parts = tl.load(address, mask=part_mask[:, :, None], other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(running_max, tl.max(part_maxima, axis=0))
        decay = tl.exp2(running_max - new_max)
        # Rounded before lanes exchange them: when the product was fused with the addition of another lane's value,
        # lanes had different sums.
        weights = product(part_sums, tl.exp2(part_maxima - new_max[None, :]))
        denominator = denominator * decay + tl.sum(weights, axis=0)
        total = total * decay[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        running_max = new_max
    total /= (denominator + tl.exp2(sink_log2 - running_max))[:, None]
    if HAS_COS_SIN:
        even, odd = tl.split(tl.reshape(total, (HEADS, COLUMNS // 2, 2)))
        even, odd = rotate(even, odd, cos[None, :], -sin[None, :])
        total = tl.reshape(tl.join(even, odd), (HEADS, COLUMNS))
    return total
