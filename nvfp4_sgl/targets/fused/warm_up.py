"""The passes that compile every kernel variant that a request can need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from nvfp4_sgl.model.contract import PassKind, PassRequest, Slots
from nvfp4_sgl.model.tokens import aligned
from nvfp4_sgl.triton_kernels.attention import tiling
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import TWO_LAUNCH_MIN_TOKENS
from nvfp4_sgl.weights.parallel import TensorParallel

MAX_SHORT_PROMPT = 256
"""Tokens of the largest prompt that is run from its beginning, too: for more, attention's tiles are the same at any
length. Of so many, queries share programs already, which depends on the length where entries are chosen."""

Kind = Callable[[int], Hashable]
"""What a target's kernels are compiled for in a pass of so many tokens, apart from the rules of :func:`sizes`."""


def _same_for_all(tokens: int) -> Hashable:
    """The kind of every size, for a target that tells none apart."""
    return None


def sizes(limit: int, kind: Kind = _same_for_all) -> list[int]:
    """Sizes from 1 to ``limit`` that between them need every kernel variant.

    They are every power of two and its successor, the limit, the largest multiple of 16, and one of each kind. Kernels
    choose their variants by thresholds and ranges that end at powers of two, and Triton compiles one variant for 1, one
    for multiples of 16 and one for other values. Whatever else they depend on is the target's ``kind``.
    """
    powers = [1 << n for n in range(limit.bit_length())]
    found = {size for power in powers for size in (power, power + 1)} | {limit // 16 * 16, limit}
    if kind is not _same_for_all:
        found |= set(last_of_each(limit, lambda size: ((size - 1).bit_length(), kind(size))))
    return sorted(size for size in found if 0 < size <= limit)


def last_of_each(limit: int, kind: Kind) -> list[int]:
    """The largest multiple of 16 and the largest other size of each kind among 1 to ``limit``."""
    return sorted({(size % 16 == 0, kind(size)): size for size in range(1, limit + 1)}.values())


def divided_sizes(limit: int, parallel: TensorParallel) -> set[int]:
    """Sizes up to ``limit`` of which the last rank's part is each of :func:`sizes`."""
    if parallel.sequence is None or parallel.size == 1:
        return set()
    found = {parallel.size * aligned(part) - (aligned(part) - part) for part in sizes(limit // parallel.size)}
    return {size for size in found if parallel.sequence.least_tokens <= size <= limit}


def sizes_of_several(requests: int, each: int, kind: Kind) -> list[int]:
    """Numbers of requests, up to ``requests``, that between them need every kernel variant where each adds ``each``.

    The largest of each range of powers of two of either number, for 1, multiples of 16 and others, of each kind, and of
    those whose queries share programs of attention and the others.
    """

    def variant(size: int) -> Hashable:
        tokens = size * each
        ranges = size == 1, (size - 1).bit_length(), (tokens - 1).bit_length(), tokens >= tiling.MIN_TOGETHER
        return *ranges, tokens % 16 == 0, kind(tokens)

    return last_of_each(requests, variant)


def warm_up_passes(
    slots: Slots,
    tokens: int,
    parallel: TensorParallel,
    kind: Kind = _same_for_all,
    tile: Kind = _same_for_all,
    block: int = 0,
) -> Iterator[PassRequest]:
    """Passes of every size on request slot 0 and page 0, which SGLang keeps for padding, in the dtypes of its batches.

    Args:
        slots: the tables of slots; row 0 of the table is all zeros, and 0 maps to 0.
        tokens: tokens of the largest prefill pass.
        parallel: this rank's share; if it divides long passes, the last rank's part has each of the sizes in turn.
        kind: what kernels are compiled for by the number of tokens.
        tile: the part of ``kind`` for kernels that are also compiled for the number of requests.
        block: tokens of a draft's block; 0 if there are none.
    """
    device, whole = slots.table.device, min(slots.longest, slots.table.shape[1])

    def request(added: list[int], pass_kind: PassKind = PassKind.EXTEND, *, end: int = whole) -> PassRequest:
        """A pass of requests with so many new tokens each that end at ``end``: windows close and entries are scored."""
        positions = torch.cat([torch.arange(end - count, end, device=device) for count in added])
        new_tokens = torch.tensor(added, dtype=torch.int32, device=device)
        lengths = torch.full_like(new_tokens, end, dtype=torch.int64)
        each: dict[str, Any] = {"tokens_each": added[0]} if pass_kind.is_by_size else {"added": new_tokens}
        return PassRequest(positions, torch.zeros_like(lengths), lengths, pass_kind, longest=end, **each)

    def shared(size: int, total: int) -> list[int]:
        """New tokens of ``size`` requests, ``total`` in all: of the first as many as one can have, and so on."""
        added, left = [1] * size, total - size
        for place in range(size):
            more = min(left, whole - 1)
            added[place], left = added[place] + more, left - more
        return added

    largest = min(tokens, whole * slots.requests)
    for size in sorted({*sizes(largest, kind), *divided_sizes(largest, parallel)}):
        yield request(shared(-(-size // whole), size))  # a pass may have more tokens than one request can
    for size in sizes(min(tokens, whole, MAX_SHORT_PROMPT), kind):
        yield request([size], end=size)  # attention chooses tiles by how long its lists may be, too
    for length in sizes(whole):
        yield request([min(length, 16)], end=length)  # the indexer's variants depend on the longest sequence
    for size in sizes(slots.requests, kind):
        yield request([1] * size, PassKind.DECODE)
        yield request([1] * size)
        sixteens = -(-(size + 1) // 16) * 16
        totals = {sixteens, sixteens + 1, TWO_LAUNCH_MIN_TOKENS, TWO_LAUNCH_MIN_TOKENS + 1}
        if tile is not _same_for_all:
            totals |= set(last_of_each(min(tokens, TWO_LAUNCH_MIN_TOKENS - 1), tile))
        for total in sorted(totals):
            if size < total <= min(tokens, whole * size):
                yield request(shared(size, total))
    for size in sorted(divided_sizes(slots.requests, parallel)):
        if size > largest:  # decode alone has so many tokens
            yield request([1] * size, PassKind.DECODE)
    each_of = ((PassKind.VERIFY, slots.drafted if slots.drafted > 1 else 0), (PassKind.BLOCK, block))
    for pass_kind, each in each_of:
        for size in sizes_of_several(slots.requests, each, kind) if each else ():
            yield request([each] * size, pass_kind)
