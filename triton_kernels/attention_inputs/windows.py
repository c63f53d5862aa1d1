"""Windows of compressed tokens: divide them over programs, pool each and store its entry.

The windows of a request that a pass touches are divided into *units*: of two windows at ratio 4, of one at ratio 128
(specification §4.1, §4.4, §4.5). The first unit, the *head*, has all windows that may need tokens of earlier passes
(at ratio 4 the second window overlaps the first), and it writes all state rows in which such history may lie. So state
rows that must be read before they are overwritten are read and overwritten by one program, in that order, whatever the
sizes of a pass.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..common.rope import mean_square_scale, rotate
from ..common.rounding import round_for
from ..entries.index_entry import hadamard128, store_index_row
from ..entries.kv_entry import store_kv_entry
from ..plan.batch import Batch


class PassArguments(NamedTuple):
    """A :class:`..plan.batch.Batch` as a kernel takes it, with the frequencies (fp32 [32]) of the entries' rotation.

    Without the numbers of tokens and of requests: Triton compiles a variant for each divisibility by 16 of a tuple's
    integers, whatever the kernel's ``do_not_specialize`` says.
    """

    owners: Tensor
    starts: Tensor
    bounds: Tensor
    requests: Tensor
    pages: Tensor
    window_slots: Tensor
    frequencies: Tensor
    pages_row: int
    page_columns: int
    window: int

    @classmethod
    def of(cls, batch: Batch, frequencies: Tensor) -> PassArguments:
        """Return the arguments for a pass."""
        return cls(
            owners=batch.owners,
            starts=batch.starts,
            bounds=batch.bounds,
            requests=batch.requests,
            pages=batch.pages,
            window_slots=batch.window_slots,
            frequencies=frequencies,
            pages_row=batch.pages.stride(0),
            page_columns=batch.pages.shape[1],
            window=batch.window_slots.shape[1],
        )


class CompressionArguments(NamedTuple):
    """A :class:`.compressor.Compression` as a kernel takes it; strides in elements, N, PAGE_SIZE and RING constants."""

    kv: Tensor
    score: Tensor
    state: Tensor
    ape: Tensor
    norm: Tensor
    pages: Tensor
    eps: float
    kv_row: int
    score_row: int
    state_row: int
    last_state_row: int
    page_stride: int
    last_slot: int
    N: tl.constexpr
    PAGE_SIZE: tl.constexpr
    RING: tl.constexpr


def unit_limit(tokens: int, requests: int, ratio: int) -> int:
    """Return an upper bound on the units of any pass of ``tokens`` tokens and ``requests`` requests.

    There is at most one unit per token; a decode pass has exactly that many. A request of k tokens touches at most
    ⌊(k + 6) / 4⌋ windows of ratio 4, an open one included, which are ⌊(k + 10) / 8⌋ units; and it closes at most
    ⌈k / 128⌉ windows of ratio 128.
    """
    if ratio == 4:
        return min(tokens, (tokens + 10 * requests) // 8)
    return min(tokens, (tokens + 127 * requests) // 128)


@triton.jit
def span(RATIO: tl.constexpr):
    """Number of windows of a unit."""
    return 2 if RATIO == 4 else 1


@triton.jit
def unit_count(start, end, RATIO: tl.constexpr):
    """Count the units of requests that add the positions start .. end − 1.

    At ratio 4 an open window counts, too, since its unit stores its tokens in the state; at ratio 128 the head stores
    all tokens.
    """
    last = (end + 3) // 4 if RATIO == 4 else end // RATIO
    units = (last - start // RATIO + span(RATIO) - 1) // span(RATIO)
    return tl.where(end > start, tl.maximum(units, 1), 0)


@triton.jit
def span_of_request(request, batch):
    """Return (the request's first token in the pass, that token's position, the position after its last token)."""
    first, start = tl.load(batch.bounds + request), tl.load(batch.starts + request)
    return first, start, start + tl.load(batch.bounds + request + 1) - first


@triton.jit
def entry_slot(request, window, batch, RATIO: tl.constexpr):
    """Return the int64 slot of the entry of a request's window; negative if the request's pages do not reach it."""
    number = window * RATIO // 256
    page = tl.load(batch.pages + request * batch.pages_row + number, mask=number < batch.page_columns, other=-256)
    return page.to(tl.int64) // RATIO + window % (256 // RATIO)


@triton.jit
def unit_of_token(token, batch, RATIO: tl.constexpr):
    """Return (request, first window, whether it is the head, whether it exists) of the unit that belongs to a token.

    The head belongs to its request's first token, any other unit to the first token of its first window. So every unit
    belongs to one token, whatever the requests' sizes.
    """
    request = tl.load(batch.owners + token)
    first, start, end = span_of_request(request, batch)
    position = start + token - first
    window = position // RATIO
    later = window - start // RATIO
    begins = (
        (position % RATIO == 0) & (later % span(RATIO) == 0) & (later // span(RATIO) < unit_count(start, end, RATIO))
    )
    is_head = token == first
    return request, window, is_head, is_head | begins


@triton.jit
def unit_of_number(number, requests, batch, RATIO: tl.constexpr, PADDED: tl.constexpr):
    """Return (request, first window, whether it is the head, whether it exists) of the ``number``-th unit.

    Units are numbered request after request, each request's head first. PADDED: a power of two, at least the number
    ``requests``.
    """
    request = tl.arange(0, PADDED)
    inside = request < requests
    start = tl.load(batch.starts + request, mask=inside, other=0)
    end = start + tl.load(batch.bounds + request + 1, mask=inside, other=0)
    end -= tl.load(batch.bounds + request, mask=inside, other=0)
    reached = tl.cumsum(unit_count(start, end, RATIO), 0)
    owner = tl.sum((reached <= number).to(tl.int32), 0)
    within = number - tl.max(tl.where(reached <= number, reached, 0), 0)
    exists = owner < requests
    owner = tl.minimum(owner, requests - 1)
    return owner, tl.load(batch.starts + owner) // RATIO + within * span(RATIO), within == 0, exists


@triton.jit
def load_rows(new, fresh, old, history, column, other):
    """Load columns ``column`` of R rows: fp32 [R, n].

    A row comes from ``fresh`` where new, from ``history`` where old, and is ``other`` elsewhere. fresh, history:
    pointers [R, 1]. new, old: bool [R, 1]. If both pointers are of one type it is one load: two would hold twice the
    registers while rows are being loaded.
    """
    if fresh.dtype == history.dtype:
        at = tl.where(new, fresh + column, history + column)
        return tl.load(at, mask=new | old, other=other).to(tl.float32)
    else:
        values = tl.load(fresh + column, mask=new, other=other).to(tl.float32)
        return tl.where(new, values, tl.load(history + column, mask=old, other=other).to(tl.float32))


@triton.jit
def pool(values, scores):
    """Weight fp32 values [R, n] by the softmax of scores over R, by column, and add them: fp32 [n].

    A score of −inf marks a row that is absent. Eight rows of 512 are added in pairs, rows 4 apart first, numerator and
    denominator together: a sum of two has no order, so the bits do not depend on how many warps share the rows.
    """
    weights = tl.exp(scores - tl.max(scores, axis=0)[None, :])
    if values.shape[0] == 8 and values.shape[1] == 512:
        both = tl.reshape(tl.join(values * weights, weights), (2, 2, 2, 512, 2))
        weighted, total = tl.split(tl.sum(tl.sum(tl.sum(both, axis=0), axis=0), axis=0))
    else:
        weighted, total = tl.sum(values * weights, axis=0), tl.sum(weights, axis=0)
    return tl.div_rn(weighted, total)


@triton.jit
def ask_for_entry(call, frequencies):
    """Load what :func:`store_entry` needs beside the pooled row: (norm, frequencies).

    Call it before the window's rows are used, so that both arrive together.
    """
    column = tl.arange(0, call.N // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    return tl.load(call.norm + column), tl.load(frequencies + tl.arange(0, 32))


@triton.jit
def store_entry(pooled, norm, frequencies, position, slot, call):
    """Normalise a pooled row, rotate its last 64 columns to ``position``, and store it in the format of ``call.pages``.

    Pages of uint8 hold packed entries: of 584 bytes for n = 512, of 132 bytes for n = 128, which are rotated by the
    Hadamard matrix first. Other pages hold rows of n.

    Args:
        pooled: fp32 [n/64, 64].
        norm, frequencies: from :func:`ask_for_entry`.
        position: of the window's first token.
        slot: int64; nothing is stored if it is outside the pool.
        call: :class:`CompressionArguments`.
    """
    BLOCKS: tl.constexpr = pooled.shape[0]
    block = tl.arange(0, BLOCKS)[:, None]
    column = block * 64 + tl.arange(0, 64)[None, :]
    scale = mean_square_scale(tl.sum(tl.sum(pooled * pooled, axis=1), axis=0), BLOCKS * 64.0, call.eps)
    rows = pooled * scale * norm.to(tl.float32)

    # Select the last block by a sum whose other terms are zero.
    is_tail = block == BLOCKS - 1
    even, odd = tl.split(tl.reshape(tl.sum(tl.where(is_tail, rows, 0.0), axis=0), (32, 2)))
    angle = position * frequencies
    even, odd = rotate(even, odd, tl.cos(angle), tl.sin(angle))

    exists = (slot >= 0) & (slot <= call.last_slot)
    if call.pages.dtype.element_ty == tl.uint8 and BLOCKS == 8:
        if exists:
            store_kv_entry(rows, even, odd, slot, call.pages, call.page_stride, call.PAGE_SIZE)
    else:
        rows = tl.where(is_tail, tl.reshape(tl.join(even, odd), (1, 64)), rows)
        if call.pages.dtype.element_ty == tl.uint8:
            keys = hadamard128(tl.reshape(rows, (1, 128)))
            one_slot = tl.zeros((1,), tl.int64)
            store_index_row(
                keys, one_slot + slot, (one_slot == 0) & exists, call.pages, call.page_stride, call.PAGE_SIZE
            )
        else:
            page = call.pages + slot // call.PAGE_SIZE * call.page_stride
            at = page + slot % call.PAGE_SIZE * (BLOCKS * 64) + column
            tl.store(at, round_for(rows, call.pages), mask=exists)
