"""The kernel of an mHC site: mix the streams, multiply them with ``fn``, collapse and normalise, in one launch.

A program has one of three tasks, for one block of tokens (specification §2):

* A *mixer* takes one split of d. It writes the next streams, multiplies them with ``fn`` while they are in registers,
  stores its partial sums of the GEMM and of the squares in ``parts``, and raises the block's semaphore. If ranks send
  parts of the sublayer's output (:mod:`..common.inbox`), it waits for those of its columns and adds them.
* A *collapser* waits until all mixers of the block have raised the semaphore. It adds the partial sums in a fixed order
  and collapses, normalises and, if wanted, quantises one row or several. It reads the streams from L2.
* A *balancer* waits in the same way and computes *post* and *comb* for the next site. It is a task of its own because
  Sinkhorn takes as long as all that is done to a row, and nothing in the row needs its result. The final collapse has
  no balancers.

A launch ends with its last follower, so followers do little between the wait and their end: they load constants, which
the step's weights have driven out of L2, before they wait.

The collapsers and balancers of a block are its *followers*. They come ``lag`` blocks of mixers after its own mixers:
late enough that they hardly ever wait, early enough that L2 still holds the block.

Supports four bf16 streams of any d that a program's registers hold as a row. The kernel does not split rows among
collapsers.

Waiting cannot block the device. Followers wait for mixers. Mixers wait for no program of this launch, and at most for
earlier kernels, this rank's and others' (:mod:`..common.inbox`). With TICKETS a program gets its task by a ticket that
it takes when it begins, and a block's mixers have lower tickets than its followers: a follower waits for programs that
have begun. A ticket costs a round trip to L2. So if there are few followers tasks follow from the program's number:
fewer programs wait than the chip has multiprocessors, and mixers find a place.

Semaphores are int32: first the ticket counter, then one semaphore a block. A block's semaphore counts the mixers that
have stored their part, and from there on the followers that wait no longer. The program that takes the last ticket, and
the last program of each block, leave zero. No result depends on the order of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info

from ..common.dot import dot_bf16
from ..common.inbox import clear, receive
from ..common.overlap import after_previous, prefetch_constants
from ..common.rounding import INTERPRETED, round_for, round_to_bf16, widen
from ..common.semaphores import count_out, wait_for
from ..quantize.nvfp4 import load_halves, store_halves
from ..quantize.rows import store_quantized_row
from .sinkhorn import COMB as COMB_ROW
from .sinkhorn import POST as POST_ROW
from .sinkhorn import balance, power_of_2, reciprocal

COLUMNS = tl.constexpr(32)
"""Columns of a partial sum: the rows of ``fn``, then the sum of squares, then padding."""
LOG2_E = tl.constexpr(1.4426950408889634)
LINE_VALUES = tl.constexpr(32)
"""Values of a line that is prefetched, of the widest dtype: 128 bytes of fp32."""


@triton.jit
def _gemm(x, at, mask, size):
    """``x @ weight^T`` of bf16 x [T, K] and an fp32 weight [N, K] stored as three bf16 parts ``size`` elements apart.

    Products are exact, sums fp32.
    """
    if not INTERPRETED and not (x.shape[0] >= 64 and target_info.cuda_capability_geq(10, 0)):
        # Keeps the compiler from computing x a second time in the layout that the tensor core needs, which takes more
        # registers than there are. tcgen05, which is used from 64 rows on, reads x from shared memory.
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    total = tl.zeros((x.shape[0], 32), tl.float32)
    for part in tl.static_range(3):
        weight = tl.load(at + part * size, mask=mask, other=0.0)
        total = dot_bf16(x, tl.trans(weight), total)
    return total


@triton.jit
def _concatenated(x0, x1, x2, x3):
    """Concatenate four [N, K] to [N, 4 * K]; values that are neighbours in a row of one thread stay so."""
    joined = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.reshape(tl.permute(joined, (0, 2, 3, 1)), (x0.shape[0], 4 * x0.shape[1]))


@triton.jit
def as_fp32(x):
    """Widen bf16 to fp32; fp32 stays as it is."""
    if x.dtype == tl.bfloat16:
        return widen(x)
    else:
        return x


@triton.jit
def mixed(h, x0, x1, x2, x3, post, c0, c1, c2, c3):
    """``post_k h + sum_j comb[j, k] x_j`` of one stream k, in fp32, with the same fused multiply-adds everywhere."""
    return tl.fma(post, h, tl.fma(c3, x3, tl.fma(c2, x2, tl.fma(c1, x1, c0 * x0))))


@triton.jit
def _task(semaphores, blocks, splits, followers, lag, TICKETS: tl.constexpr):
    """This program's block and its task, a number within the block: mixers first, then collapsers, then balancers.

    Tasks are ordered so: the mixers of ``lag`` blocks; then, block by block, the mixers of a block and the followers of
    the block ``lag`` earlier; then the remaining followers.
    """
    if TICKETS:
        number = tl.atomic_add(semaphores, 1, sem="relaxed", scope="gpu")
        if number == tl.num_programs(0) - 1:
            tl.store(semaphores, 0)
    else:
        number = tl.program_id(0)
    ahead = lag * splits
    block_programs = splits + followers
    last = ahead + (blocks - lag) * block_programs
    if number < ahead:
        block, task = number // splits, number % splits
    elif number < last:
        task = (number - ahead) % block_programs
        block = (number - ahead) // block_programs + tl.where(task < splits, lag, 0)
    else:
        block, task = blocks - lag + (number - last) // followers, splits + (number - last) % followers
    return block, task


@triton.jit
def _mix(
    streams, output, post, comb, fn, next_streams, parts, block, split, tokens, d, d_per_split,
    POST: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A mixer's task: one split of d of a block's tokens."""
    first = block.to(tl.int64) * BLOCK_T
    # From here on tokens count from the block's first: offsets within it fit int32.
    token = tl.arange(0, BLOCK_T)
    here = token < tokens - first
    streams += first * 4 * d
    next_streams += first * 4 * d
    row = tl.arange(0, COLUMNS)
    total = tl.zeros((BLOCK_T, COLUMNS), tl.float32)
    squares = tl.zeros((BLOCK_T,), tl.float32)
    if POST:
        if RANKS == 0:
            output += first * d
        post += first * 4
        comb += first * 16
        p0 = tl.load(post + token * 4, mask=here, other=0.0)[:, None]
        p1 = tl.load(post + token * 4 + 1, mask=here, other=0.0)[:, None]
        p2 = tl.load(post + token * 4 + 2, mask=here, other=0.0)[:, None]
        p3 = tl.load(post + token * 4 + 3, mask=here, other=0.0)[:, None]
        c = comb + token * 16
        c00 = tl.load(c, mask=here, other=0.0)[:, None]
        c01 = tl.load(c + 1, mask=here, other=0.0)[:, None]
        c02 = tl.load(c + 2, mask=here, other=0.0)[:, None]
        c03 = tl.load(c + 3, mask=here, other=0.0)[:, None]
        c10 = tl.load(c + 4, mask=here, other=0.0)[:, None]
        c11 = tl.load(c + 5, mask=here, other=0.0)[:, None]
        c12 = tl.load(c + 6, mask=here, other=0.0)[:, None]
        c13 = tl.load(c + 7, mask=here, other=0.0)[:, None]
        c20 = tl.load(c + 8, mask=here, other=0.0)[:, None]
        c21 = tl.load(c + 9, mask=here, other=0.0)[:, None]
        c22 = tl.load(c + 10, mask=here, other=0.0)[:, None]
        c23 = tl.load(c + 11, mask=here, other=0.0)[:, None]
        c30 = tl.load(c + 12, mask=here, other=0.0)[:, None]
        c31 = tl.load(c + 13, mask=here, other=0.0)[:, None]
        c32 = tl.load(c + 14, mask=here, other=0.0)[:, None]
        c33 = tl.load(c + 15, mask=here, other=0.0)[:, None]
    for start in tl.range(split * d_per_split, min((split + 1) * d_per_split, d), BLOCK_D, num_stages=STAGES):
        # The tensor core takes the columns of all four streams at once, because each of its GEMMs waits for the last.
        k = tl.arange(0, 4 * BLOCK_D)
        if POST:
            column = start + tl.arange(0, BLOCK_D)
            mask = here[:, None] & ((column < d) | EVEN)[None, :]
            at = token[:, None] * (4 * d) + column[None, :]
            if RANKS > 0:
                # While the loads of this step, which are asynchronous, are on their way.
                h = receive(output, (first + token)[:, None] * d + column[None, :], mask, RANKS)
            x0 = widen(tl.load(streams + at, mask=mask, other=0.0))
            x1 = widen(tl.load(streams + at + d, mask=mask, other=0.0))
            x2 = widen(tl.load(streams + at + 2 * d, mask=mask, other=0.0))
            x3 = widen(tl.load(streams + at + 3 * d, mask=mask, other=0.0))
            if RANKS == 0:
                h = as_fp32(tl.load(output + token[:, None] * d + column[None, :], mask=mask, other=0.0))
            y0 = round_for(mixed(h, x0, x1, x2, x3, p0, c00, c10, c20, c30), next_streams)
            y1 = round_for(mixed(h, x0, x1, x2, x3, p1, c01, c11, c21, c31), next_streams)
            y2 = round_for(mixed(h, x0, x1, x2, x3, p2, c02, c12, c22, c32), next_streams)
            y3 = round_for(mixed(h, x0, x1, x2, x3, p3, c03, c13, c23, c33), next_streams)
            tl.store(next_streams + at, y0, mask=mask)
            tl.store(next_streams + at + d, y1, mask=mask)
            tl.store(next_streams + at + 2 * d, y2, mask=mask)
            tl.store(next_streams + at + 3 * d, y3, mask=mask)
            x = _concatenated(y0, y1, y2, y3)
            # BLOCK_D columns of each stream, one stream after another.
            within = start + k % BLOCK_D
            column = k // BLOCK_D * d + within
            inside = (within < d) | EVEN
        else:
            # Nothing is mixed, so a token's four streams are one row, and any 4 * BLOCK_D columns of it will do.
            column = 4 * start + k
            inside = (column < 4 * d) | EVEN
            at = token[:, None] * (4 * d) + column[None, :]
            x = tl.load(streams + at, mask=here[:, None] & inside[None, :], other=0.0)
        at = row[:, None] * (4 * d) + column[None, :]
        w_mask = (row < ROWS)[:, None] & inside[None, :]
        # The tensor core truncates sums where fp32 would round them. Over thousands of additions that is a drift, so
        # the long sum is left to ordinary fp32 additions.
        total += _gemm(x, fn + at, w_mask, ROWS * 4 * d)
        values = widen(x)
        squares += tl.sum(values * values, axis=1)
    total = tl.where((row == ROWS)[None, :], squares[:, None], total)
    parts += (split.to(tl.int64) * tokens + first) * COLUMNS
    tl.store(parts + token[:, None] * COLUMNS + row[None, :], total, mask=here[:, None])


@triton.jit
def _clear(
    inbox, block, split, tokens, d, d_per_split,
    RANKS: tl.constexpr, EVEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Empty what a mixer has received."""
    token = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    for start in range(split * d_per_split, min((split + 1) * d_per_split, d), BLOCK_D):
        column = start + tl.arange(0, BLOCK_D)
        mask = (token < tokens)[:, None] & ((column < d) | EVEN)[None, :]
        clear(inbox, token[:, None] * d + column[None, :], mask, RANKS)


@triton.jit
def _prefetch_fn(fn, start, d, ROWS: tl.constexpr, POST: tl.constexpr):
    """Ask L2 for what a mixer multiplies first, 32 columns of each stream from ``start`` on: ``fn`` as stored."""
    row = tl.minimum(tl.arange(0, 32), ROWS - 1)
    stream = tl.arange(0, 4)
    # Where nothing is mixed, a token's four streams are one row.
    column = (stream * d + start) if POST else (4 * start + stream * 32)
    for part in tl.static_range(3):
        at = part * ROWS * 4 * d + row[:, None] * (4 * d) + column[None, :]
        prefetch_constants(fn + tl.minimum(at, 3 * ROWS * 4 * d - 1))


@triton.jit
def _column(total, column, INDEX: tl.constexpr):
    """Column INDEX of ``total`` [T, N], in every thread that holds its row."""
    return tl.sum(tl.where(column[None, :] == INDEX, total, 0.0), axis=1)


@triton.jit
def _sigmoid(exponent):
    """The sigmoid of ``-exponent / LOG2_E``."""
    return reciprocal(1.0 + power_of_2(exponent))


@triton.jit
def _load_sums(parts, row, tokens, splits, ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Load the partial sums of *pre* and of the squares of tokens ``row``, int64 [R]: fp32 [R, S, 4] and [R, S]."""
    part = tl.arange(0, BLOCK_SPLITS)
    at = parts + (part.to(tl.int64)[None, :] * tokens + row[:, None]) * COLUMNS
    mask = (part < splits)[None, :] & (row < tokens)[:, None]
    at_pre = at[:, :, None] + tl.arange(0, 4)[None, None, :]
    return (
        tl.load(at_pre, mask=mask[:, :, None], other=0.0, cache_modifier=".cg"),
        tl.load(at + ROWS, mask=mask, other=0.0, cache_modifier=".cg"),
    )


@triton.jit
def _load_streams(streams, token, d, BLOCKS: tl.constexpr):
    """Load a token's row of each stream as two tiles, see :func:`nvfp4.load_halves`."""
    at = streams + token * (4 * d)
    first0, last0 = load_halves(at, d, BLOCKS, ".cg")
    first1, last1 = load_halves(at + d, d, BLOCKS, ".cg")
    first2, last2 = load_halves(at + 2 * d, d, BLOCKS, ".cg")
    first3, last3 = load_halves(at + 3 * d, d, BLOCKS, ".cg")
    return first0, last0, first1, last1, first2, last2, first3, last3


@triton.jit
def _finish_row(
    first, last, weight, norm, out, rows, token, d, norm_eps, NORM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Round, normalise and store a collapsed row, and store it in NVFP4, too, if ``rows`` is given.

    norm: what ``weight`` holds, if it has been loaded, else an empty tuple.
    """
    first, last = round_to_bf16(first), round_to_bf16(last)
    if NORM:
        # The statistics are those of the rounded values, as if RMSNorm read the row from memory.
        inverse_rms = tl.rsqrt(tl.sum(tl.sum(first * first + last * last, axis=1), axis=0) / d + norm_eps)
        if len(norm) == 0:
            norm = load_halves(weight, d, BLOCKS)
        first = round_to_bf16(first * inverse_rms * norm[0])
        last = round_to_bf16(last * inverse_rms * norm[1])
    store_halves(out + token * d, first.to(tl.bfloat16), last.to(tl.bfloat16), d, BLOCKS)
    if len(rows) > 0:
        store_quantized_row(first, last, rows, token, 0, d // 16, BLOCKS)


@triton.jit
def _collapse(
    streams, parts, base, scale, weight, out, rows, semaphore, programs, first, count, tokens, d, splits, share,
    hc_eps, norm_eps, ROWS: tl.constexpr, NORM: tl.constexpr, COLLAPSED: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """A collapser's task: ``count`` tokens from ``first`` (int64) on, at most COLLAPSED."""
    index = tl.arange(0, COLLAPSED)
    # Constants come from memory while mixers are at work. Multiplied here, they do not keep the coefficients waiting
    # for the streams: loads share a few scoreboards, and the first use of one waits for all loads that share its own.
    gain = tl.load(scale) * -LOG2_E
    b0, b1, b2, b3 = tl.load(base), tl.load(base + 1), tl.load(base + 2), tl.load(base + 3)
    b0, b1, b2, b3 = b0 * -LOG2_E, b1 * -LOG2_E, b2 * -LOG2_E, b3 * -LOG2_E
    norm = ()  # type: tuple[tl.tensor, ...]
    if NORM and COLLAPSED == 1:
        norm = load_halves(weight, d, BLOCKS)
    wait_for(semaphore, splits)
    count_out(semaphore, programs - 1)
    sums, squares = _load_sums(parts, first + index, tokens, splits, ROWS, BLOCK_SPLITS)
    if COLLAPSED == 1:
        # Loaded ahead of the coefficients, which are computed while the streams arrive. The assembler would load some
        # once the sums have been added up, but moves no load behind a barrier.
        x0, y0, x1, y1, x2, y2, x3, y3 = _load_streams(streams, first, d, BLOCKS)
        tl.debug_barrier()
    factor = tl.rsqrt(tl.sum(squares, axis=1) * share + norm_eps) * gain
    sums = tl.sum(sums, axis=1)
    stream = tl.arange(0, 4)
    p0 = _sigmoid(_column(sums, stream, 0) * factor + b0) + hc_eps
    p1 = _sigmoid(_column(sums, stream, 1) * factor + b1) + hc_eps
    p2 = _sigmoid(_column(sums, stream, 2) * factor + b2) + hc_eps
    p3 = _sigmoid(_column(sums, stream, 3) * factor + b3) + hc_eps
    for row in tl.range(0, count):
        if COLLAPSED > 1:
            x0, y0, x1, y1, x2, y2, x3, y3 = _load_streams(streams, first + row, d, BLOCKS)
        q0 = tl.sum(tl.where(index == row, p0, 0.0), axis=0)
        q1 = tl.sum(tl.where(index == row, p1, 0.0), axis=0)
        q2 = tl.sum(tl.where(index == row, p2, 0.0), axis=0)
        q3 = tl.sum(tl.where(index == row, p3, 0.0), axis=0)
        _finish_row(
            (q0 * x0 + q1 * x1) + (q2 * x2 + q3 * x3), (q0 * y0 + q1 * y1) + (q2 * y2 + q3 * y3), weight, norm,
            out, rows, first + row, d, norm_eps, NORM, BLOCKS,
        )  # fmt: skip


@triton.jit
def _of_fours(x):
    """Split [T, 4 * N] into its columns 0, 4, ..., those from 1 on, from 2 on and from 3 on, [T, N] each."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _everywhere(x, INDEX: tl.constexpr):
    """Column INDEX of ``x`` [T, N], in each of N columns."""
    return tl.gather(x, tl.full(x.shape, INDEX, tl.int32), 1)


@triton.jit
def _balance(
    parts, exchange, base, scale, post, comb, semaphore, programs, first, tokens, splits, share, hc_eps, norm_eps,
    ROWS: tl.constexpr, ITERATIONS: tl.constexpr, BALANCED: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """A balancer's task: *post* and *comb* of BALANCED tokens from ``first`` (int64) on.

    Four rows of ``fn``, such as *post* or a row of *comb*, are a group: four numbers of one thread. exchange: fp32, 32
    a token, for BALANCED above 1.
    """
    GROUPS: tl.constexpr = COLUMNS // 4
    POST_GROUP: tl.constexpr = POST_ROW // 4
    COMB_GROUP: tl.constexpr = COMB_ROW // 4
    # Few enough splits at a time that each thread holds few values.
    SPLITS_AT_ONCE: tl.constexpr = max(1, min(BLOCK_SPLITS, 256 // BALANCED))
    group = tl.arange(0, GROUPS)[None, :]
    # Constants come from memory while mixers are at work. *post* and the softmax are powers of 2.
    to_exponent = tl.where(group == POST_GROUP, -LOG2_E, LOG2_E)
    gain = tl.load(scale + tl.where(group < COMB_GROUP, 1, 2)) * to_exponent
    base += tl.minimum(group, ROWS // 4 - 1) * 4
    base0, base1 = tl.load(base) * to_exponent, tl.load(base + 1) * to_exponent
    base2, base3 = tl.load(base + 2) * to_exponent, tl.load(base + 3) * to_exponent
    token = first + tl.arange(0, BALANCED)
    here = token < tokens
    part = tl.arange(0, SPLITS_AT_ONCE)[:, None, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    if BLOCK_SPLITS == SPLITS_AT_ONCE:
        at = parts + (part.to(tl.int64) * tokens + token[None, :, None]) * COLUMNS + column
        mask = here[None, :, None] & (part < splits)
        wait_for(semaphore, splits)
        values = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        count_out(semaphore, programs - 1)
        total = tl.sum(values, axis=0)
    else:
        wait_for(semaphore, splits)
        count_out(semaphore, programs - 1)
        total = tl.zeros((BALANCED, COLUMNS), tl.float32)
        for start in range(0, splits, SPLITS_AT_ONCE):
            at = parts + ((start + part).to(tl.int64) * tokens + token[None, :, None]) * COLUMNS + column
            mask = here[None, :, None] & (start + part < splits)
            total += tl.sum(tl.load(at, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
    t0, t1, t2, t3 = _of_fours(total)
    factor = tl.rsqrt(_everywhere(t0, ROWS // 4) * share + norm_eps) * gain
    # The groups of *pre* and those beyond ROWS are computed with the others and left.
    t0, t1, t2, t3 = t0 * factor + base0, t1 * factor + base1, t2 * factor + base2, t3 * factor + base3
    top = tl.maximum(tl.maximum(t0, t1), tl.maximum(t2, t3))
    top = tl.where(group == POST_GROUP, 0.0, top)
    t0, t1, t2, t3 = power_of_2(t0 - top), power_of_2(t1 - top), power_of_2(t2 - top), power_of_2(t3 - top)
    inverse = reciprocal((t0 + t1) + (t2 + t3))
    k0, k1, k2, k3 = t0 * inverse + hc_eps, t1 * inverse + hc_eps, t2 * inverse + hc_eps, t3 * inverse + hc_eps
    p0, p1, p2, p3 = reciprocal(1 + t0), reciprocal(1 + t1), reciprocal(1 + t2), reciprocal(1 + t3)
    post += token[:, None] * 4 + tl.zeros((1, GROUPS), tl.int32)
    of_post = here[:, None] & (group == POST_GROUP)
    tl.store(post, 2 * p0, mask=of_post)
    tl.store(post + 1, 2 * p1, mask=of_post)
    tl.store(post + 2, 2 * p2, mask=of_post)
    tl.store(post + 3, 2 * p3, mask=of_post)
    entries = ()  # type: tuple[tl.tensor, ...]
    if BALANCED == 1:
        for row in tl.static_range(COMB_GROUP, ROWS // 4):
            entries += (_everywhere(k0, row), _everywhere(k1, row), _everywhere(k2, row), _everywhere(k3, row))
        x0, x1, x2, x3, y0, y1, y2, y3 = balance(*entries, hc_eps, ITERATIONS)
        row = group - COMB_GROUP
        x = tl.where(row < 2, tl.where(row == 0, x0, x1), tl.where(row == 2, x2, x3))
        comb += token[:, None] * 16 + row * 4
        of_comb = here[:, None] & (row >= 0) & (row < 4)
        tl.store(comb, k0 * x * y0, mask=of_comb)
        tl.store(comb + 1, k1 * x * y1, mask=of_comb)
        tl.store(comb + 2, k2 * x * y2, mask=of_comb)
        tl.store(comb + 3, k3 * x * y3, mask=of_comb)
    else:
        # Through memory, which leaves a token to each lane. Lanes beyond the last token compute the same as the last
        # one, and store nothing.
        to = exchange + token[:, None] * COLUMNS + group
        tl.store(to, k0, mask=here[:, None])
        tl.store(to + GROUPS, k1, mask=here[:, None])
        tl.store(to + 2 * GROUPS, k2, mask=here[:, None])
        tl.store(to + 3 * GROUPS, k3, mask=here[:, None])
        tl.debug_barrier()
        exchange += tl.minimum(token, tokens - 1) * COLUMNS
        for row in tl.static_range(COMB_GROUP, ROWS // 4):
            for k in tl.static_range(4):
                entries += (tl.load(exchange + (k * GROUPS + row), cache_modifier=".cg"),)
        x0, x1, x2, x3, y0, y1, y2, y3 = balance(*entries, hc_eps, ITERATIONS)
        x, y = (x0, x1, x2, x3), (y0, y1, y2, y3)
        comb += token * 16
        for row in tl.static_range(4):
            for k in tl.static_range(4):
                tl.store(comb + (4 * row + k), entries[4 * row + k] * x[row] * y[k], mask=here)


@triton.jit(do_not_specialize=["tokens", "splits", "lag"])
def site_kernel(
    streams, output, post, comb, fn, base, scale, weight, next_streams, out, rows, parts, exchange, semaphores, tokens,
    d, d_per_split, splits, lag, hc_eps, norm_eps,
    POST: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, ITERATIONS: tl.constexpr, NORM: tl.constexpr,
    TICKETS: tl.constexpr, EVEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    COLLAPSED: tl.constexpr, BALANCED: tl.constexpr, BLOCK_SPLITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One mHC site. Grid: for each block of BLOCK_T tokens, ``splits`` mixers and ``Tiling.followers`` followers.

    rows: ``quantize.rows.RowsArguments``, or an empty tuple. POST: whether ``output`` is mixed into the streams first;
    else ``next_streams`` is ``streams``, and nothing is stored there. RANKS: if not 0, ``output`` is
    ``Inbox.arguments()``, where the parts of so many ranks come. ROWS: rows of ``fn``; 4 for the final collapse.
    EVEN: whether BLOCK_D divides d. COLLAPSED, BALANCED: tokens of one collapser, of one balancer. BLOCK_SPLITS: a
    power of two, at least ``splits``. BLOCKS: a power of two, blocks of 16 columns that hold d.
    """
    HEAD: tl.constexpr = ROWS == 4
    largest = tl.minimum(tokens, BLOCK_T)
    collapsers = tl.cdiv(largest, COLLAPSED)
    balancers = 0 if HEAD else tl.cdiv(largest, BALANCED)
    if TICKETS:
        after_previous()
        block, task = _task(semaphores, tl.cdiv(tokens, BLOCK_T), splits, collapsers + balancers, lag, TICKETS)
    else:
        block, task = _task(semaphores, tl.cdiv(tokens, BLOCK_T), splits, collapsers + balancers, lag, TICKETS)
        if task < splits:
            _prefetch_fn(fn, task * d_per_split, d, ROWS, POST)
        elif NORM:
            LINES: tl.constexpr = BLOCKS * 16 // LINE_VALUES if BLOCKS > 1 else 1
            line = tl.arange(0, LINES)
            prefetch_constants(weight + tl.minimum(line * LINE_VALUES, d - 1))
        after_previous()
    semaphore = semaphores + 1 + block
    if task < splits:
        _mix(
            streams, output, post, comb, fn, next_streams, parts, block, task, tokens, d, d_per_split, POST, RANKS,
            ROWS, EVEN, BLOCK_T, BLOCK_D, STAGES,
        )  # fmt: skip
        # All stores of the program must be in memory before it raises the semaphore.
        tl.debug_barrier()
        tl.atomic_add(semaphore, 1, sem="release", scope="gpu")
        if RANKS > 0:
            # All of its threads have read. No follower waits for this.
            _clear(output, block, task, tokens, d, d_per_split, RANKS, EVEN, BLOCK_T, BLOCK_D)
    else:
        # The last block may have fewer tokens, and then fewer of its programs have work.
        first = block.to(tl.int64) * BLOCK_T
        count = tl.minimum(tokens - block * BLOCK_T, BLOCK_T)
        programs = splits + tl.cdiv(count, COLLAPSED)
        if not HEAD:
            programs += tl.cdiv(count, BALANCED)
        share = 1.0 / (4 * d)
        task -= splits
        if task < collapsers:
            begin = task * COLLAPSED
            if begin < count:
                _collapse(
                    next_streams, parts, base, scale, weight, out, rows, semaphore, programs, first + begin,
                    min(COLLAPSED, count - begin), tokens, d, splits, share, hc_eps, norm_eps, ROWS, NORM, COLLAPSED,
                    BLOCK_SPLITS, BLOCKS,
                )  # fmt: skip
        elif not HEAD:
            begin = (task - collapsers) * BALANCED
            if begin < count:
                _balance(
                    parts, exchange, base, scale, post, comb, semaphore, programs, first + begin, tokens, splits,
                    share, hc_eps, norm_eps, ROWS, ITERATIONS, BALANCED, BLOCK_SPLITS,
                )  # fmt: skip
