"""The sum of a query's parts by the programs that made them, within the launch of ``attention``.

Where keys are split, each program of a query's block of heads stores its part, counts itself in, waits until all are
there, and adds its share: some columns of all parts, in a fixed order. No result depends on the order of programs.

Where the output is quantised, a row scale spans all columns of a group of heads. So each program leaves the largest
magnitudes of its share beside the parts' statistics, counts itself in once more and waits until all with a share have.
Then each quantises the share that it holds: only these few numbers pass between programs, and no program has the work
of a whole group, as the last to come would have if it read what the others stored.

Waiting cannot block the device as long as all programs of the launch have a place on the chip at once, which
``attention_tiling.most_splits`` bounds; no other launch that waits may run beside it. Programs without a part have
left.

Counters: int32, one a query and block of heads, up to the number of parts, from there up by the programs whose maxima
are there, if any are wanted, and from there up by the programs that wait no longer. The last leaves zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.rope import rotate
from ..common.rounding import INTERPRETED, product, round_for
from .quantized_output import group_scales, head_maxima, rounded, store_group_scales, store_quantized

LOG2_E = tl.constexpr(1.4426950408889634)
VALUES = tl.constexpr(64)
"""fp32 values of parts that a thread asks for at once: as many as hide the way to L2 and still fit its registers."""
HALVINGS = tl.constexpr(5)
"""Of the columns at most: shares of 16 columns fill half of a line in each row."""


@triton.constexpr_function
def _parts_at_once(heads, warps, columns):
    """Parts that a program asks for at once."""
    return max(1, VALUES.value * warps * 32 // heads // columns)


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
    first,
    heads,
    split,
    live,
    splits,
    HAS_TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    WARPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """This program's share of the output of HEADS heads from ``first`` on, once all ``live`` parts have been stored.

    values, stats: ``attention.Partials``. out: bf16, or ``None``. rows: ``quantize.rows.RowsArguments`` of groups of
    GROUP heads, or nothing. semaphores: this block's counter. Called by the programs ``split < live`` that have stored
    their parts. The columns are halved as often as leaves no more shares than parts.
    """
    # All of the program's part lies in memory before it is counted in.
    tl.debug_barrier()
    arrived = tl.atomic_add(semaphores, 1, sem="acq_rel", scope="gpu") + 1
    shares = 2
    for halvings in tl.static_range(2, HALVINGS + 1):
        shares = tl.where(live >= (1 << halvings), 1 << halvings, shares)
    if INTERPRETED:
        # One program runs after another: the last adds everything.
        if arrived < live:
            return
        tl.store(semaphores, 0)
        share, step = 0, 1
    else:
        # A few have no share: more parts than a power of two.
        if split >= shares:
            return
        while arrived < live:
            arrived = tl.atomic_add(semaphores, 0, sem="acquire", scope="gpu")
        if len(rows) == 0:
            _leave(semaphores, live + tl.minimum(live, shares) - 1)
        share, step = split, live
    for halvings in tl.static_range(1, HALVINGS + 1):
        if shares == (1 << halvings):
            if len(rows) > 0:
                _quantize_shares(
                    *(
                        values,
                        stats,
                        sink,
                        cos_sin,
                        out,
                        rows,
                        semaphores,
                        token,
                        first,
                        heads,
                        share,
                        step,
                        live,
                        splits,
                    ),
                    *(HAS_TURNS, HEADS, 512 >> halvings, _parts_at_once(HEADS, WARPS, 512 >> halvings), GROUP),
                )
            else:
                for begin in range(share * (512 >> halvings), 512, step * (512 >> halvings)):
                    total = _add_share(
                        *(values, stats, sink, cos_sin, token, first, heads, begin, live, splits),
                        *(HAS_TURNS, HEADS, 512 >> halvings, _parts_at_once(HEADS, WARPS, 512 >> halvings), 2),
                    )
                    _store(total, out, token, first, heads, begin)


@triton.jit
def _leave(semaphores, last):
    """Count a program in that waits no longer; who finds ``last`` leaves zero.

    One thread asks for it and none waits: ``inc`` wraps around by itself.
    """
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first red.relaxed.gpu.global.inc.u32 [$1], $2;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [semaphores, last],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _quantize_shares(
    values,
    stats,
    sink,
    cos_sin,
    out,
    rows,
    semaphores,
    token,
    first,
    heads,
    share,
    step,
    live,
    splits,
    HAS_TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add and quantise share number ``share`` of COLUMNS columns; in the interpreter every ``step``-th after it, too.

    A program holds its share while it waits. It has one only, as there are no fewer parts than shares; the last of the
    interpreter's programs adds the others up again.
    """
    SHARES: tl.constexpr = 512 // COLUMNS
    total = _add_share(
        *(values, stats, sink, cos_sin, token, first, heads, share * COLUMNS, live, splits),
        *(HAS_TURNS, HEADS, COLUMNS, PARTS, 3),
    )
    _store(total, out, token, first, heads, share * COLUMNS)
    total = rounded(total)
    maxima = head_maxima(total)
    if INTERPRETED:
        for other in range(share + step, SHARES, step):
            others = _add_share(
                *(values, stats, sink, cos_sin, token, first, heads, other * COLUMNS, live, splits),
                *(HAS_TURNS, HEADS, COLUMNS, PARTS, 3),
            )
            _store(others, out, token, first, heads, other * COLUMNS)
            maxima = tl.maximum(maxima, head_maxima(rounded(others)))
    head = first + tl.arange(0, HEADS)
    at = stats + (token * heads + head) * (splits * 3) + 2
    tl.store(at + share * 3, maxima, mask=head < heads)
    # All of the program's maxima lie in memory before it is counted in, or reads them.
    tl.debug_barrier()
    if not INTERPRETED:
        arrived = tl.atomic_add(semaphores, 1, sem="acq_rel", scope="gpu") + 1
        while arrived < live + SHARES:
            arrived = tl.atomic_add(semaphores, 0, sem="acquire", scope="gpu")
        _leave(semaphores, live + 2 * SHARES - 1)
    # Past L1: other programs stored them.
    sharer = at[:, None] + tl.arange(0, 1 if INTERPRETED else SHARES)[None, :] * 3
    maxima = tl.load(sharer, mask=(head < heads)[:, None], other=0.0, cache_modifier=".cg")
    scales = group_scales(tl.max(maxima, axis=1), GROUP)
    if share == 0:
        store_group_scales(scales, rows, token, first, heads, GROUP)
    store_quantized(total, scales, rows, token, first, heads, share * COLUMNS, GROUP)
    if INTERPRETED:
        for other in range(share + step, SHARES, step):
            others = _add_share(
                *(values, stats, sink, cos_sin, token, first, heads, other * COLUMNS, live, splits),
                *(HAS_TURNS, HEADS, COLUMNS, PARTS, 3),
            )
            store_quantized(rounded(others), scales, rows, token, first, heads, other * COLUMNS, GROUP)


@triton.jit
def _store(total, out, token, first, heads, begin):
    """Columns from ``begin`` of bf16 rows, if any are wanted."""
    if out is not None:
        head = first + tl.arange(0, total.shape[0])
        column = begin + tl.arange(0, total.shape[1])
        row = token * heads + head
        tl.store(out + row[:, None] * 512 + column[None, :], round_for(total, out), mask=(head < heads)[:, None])


@triton.jit
def _add_share(
    values,
    stats,
    sink,
    cos_sin,
    token,
    first,
    heads,
    begin,
    live,
    splits,
    HAS_TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    STATS: tl.constexpr,
):
    """fp32 [HEADS, COLUMNS]: columns of the output from ``begin`` on, PARTS parts at a time; STATS of each."""
    head = first + tl.arange(0, HEADS)
    known = head < heads
    row = token * heads + head
    column = begin + tl.arange(0, COLUMNS)
    # Rounded as in the parts, whose maximum it may be: fused, the rest of the product was NaN for a sink of 1e30.
    sink_top = product(tl.load(sink + head, mask=known, other=0.0), LOG2_E)
    if HAS_TURNS:
        # Ahead of the parts, so that they come with them. Pairs before the last 32 are rotated by nothing.
        pair = begin // 2 + tl.arange(0, COLUMNS // 2) - 224
        turn = cos_sin + token * 64 + pair * 2
        cos = tl.load(turn, mask=pair >= 0, other=1.0)
        sin = tl.load(turn + 1, mask=pair >= 0, other=0.0)
    top = sink_top
    denominator = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, COLUMNS), tl.float32)
    for start in tl.range(0, live, PARTS, num_stages=1):
        part = start + tl.arange(0, PARTS)
        found = (part < live)[:, None] & known[None, :]
        at = row[None, :] * splits + part[:, None]
        # Past L1: other programs wrote them during this launch.
        tops = tl.load(stats + at * STATS, mask=found, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(stats + at * STATS + 1, mask=found, other=0.0, cache_modifier=".cg")
        address = values + at[:, :, None] * 512 + column[None, None, :]
        parts = tl.load(address, mask=found[:, :, None], other=0.0, cache_modifier=".cg")
        greater = tl.maximum(top, tl.max(tops, axis=0))
        decay = tl.exp2(top - greater)
        # Rounded before lanes exchange them: fused with the addition of another lane's, lanes had different sums.
        weights = product(sums, tl.exp2(tops - greater[None, :]))
        denominator = denominator * decay + tl.sum(weights, axis=0)
        total = total * decay[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        top = greater
    total /= (denominator + tl.exp2(sink_top - top))[:, None]
    if HAS_TURNS:
        even, odd = tl.split(tl.reshape(total, (HEADS, COLUMNS // 2, 2)))
        even, odd = rotate(even, odd, cos[None, :], -sin[None, :])
        total = tl.reshape(tl.join(even, odd), (HEADS, COLUMNS))
    return total
