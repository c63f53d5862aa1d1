"""Tokens whose residual streams a rank keeps between sublayers: all of them, or its part of the pass.

Between two sublayers everything is a token's own: the sum over ranks is mixed into its streams, collapsed and
normalised (specification §2). With all tokens on every rank, ranks do the same work. In a long pass each keeps a part
of the tokens instead: the sum is a reduce-scatter, and an all-gather gives every rank the next sublayer's whole input.
The two move what an all-reduce moves. This is sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section
4.2.2). Which entries a token attends to (specification §5) is its own, too: the rank that keeps it selects them, and
another all-gather hands them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nvfp4_sgl.weights.parallel import Collective, SequenceParallel, Slot, TensorParallel

Gather = Callable[[Tensor], Tensor]
"""All tokens' rows [T, ...] from every rank's own rows [own tokens, ...]."""

ALIGNMENT = 16
"""Parts begin at multiples of this many tokens, so that slices of int32 [T] begin at multiples of 16 bytes: Triton
compiles another variant for other addresses."""


def aligned(count: int) -> int:
    """The least multiple of :data:`ALIGNMENT` that is not below ``count``."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class Tokens(Protocol):
    """The tokens of a pass as a rank keeps them between sublayers."""

    @property
    def gather(self) -> Gather | None:
        """Makes the kept tokens' rows those of all tokens; ``None`` if this rank keeps every token."""

    @property
    def kept(self) -> slice:
        """The tokens that this rank keeps."""

    def own(self, rows: Tensor) -> Tensor:
        """The kept tokens' part of ``rows`` [T, ...]; a view."""

    def sum(self, collective: Collective, part: Tensor) -> Tensor:
        """The kept tokens' rows of the sum over ranks of ``part`` [T, d], a sublayer's output."""

    def slot(self, collective: Collective) -> Slot | None:
        """The memory for the parts of that sum if the next site adds them; ``None`` if :meth:`sum` does."""


@dataclass(frozen=True)
class EveryToken:
    """Each rank keeps all ``count`` tokens."""

    parallel: TensorParallel
    count: int
    gather: None = None

    @property
    def kept(self) -> slice:
        return slice(0, self.count)

    def own(self, rows: Tensor) -> Tensor:
        return rows

    def sum(self, collective: Collective, part: Tensor) -> Tensor:
        return self.parallel.all_reduce(collective, part)

    def slot(self, collective: Collective) -> Slot | None:
        exchange = self.parallel.exchange
        return None if exchange is None or self.count > exchange.tokens else exchange.slots[collective]


@dataclass(frozen=True)
class DividedTokens:
    """Each rank keeps ``each`` of ``count`` tokens, the last one those that are left, at least one.

    Collectives move ``each`` rows of every rank. Rows behind the last token's are not initialised, and are cut off
    after each collective.
    """

    rank: int
    ranks: int
    collectives: SequenceParallel
    count: int

    @property
    def each(self) -> int:
        return aligned(-(-self.count // self.ranks))

    @property
    def kept(self) -> slice:
        return slice(self.rank * self.each, min((self.rank + 1) * self.each, self.count))

    def own(self, rows: Tensor) -> Tensor:
        return rows[self.kept]

    def sum(self, collective: Collective, part: Tensor) -> Tensor:
        summed = self.collectives.reduce_scatter(collective, _with_room(part, self.ranks * self.each))
        return summed[: self.kept.stop - self.kept.start]

    def slot(self, collective: Collective) -> None:
        return None

    def gather(self, own: Tensor) -> Tensor:
        return self.collectives.all_gather(_with_room(own, self.each))[: self.count]


def _with_room(rows: Tensor, count: int) -> Tensor:
    """``rows`` [n, ...], or, if there are fewer, a copy in a tensor of ``count``."""
    if len(rows) == count:
        return rows
    room = rows.new_empty(count, *rows.shape[1:])
    room[: len(rows)] = rows
    return room


def tokens_of(parallel: TensorParallel, count: int, planned: int | None = None) -> Tokens:
    """A rank's share of the tokens of a pass, by one rule on every rank.

    Tokens are divided if there are at least :attr:`SequenceParallel.least_tokens` and every rank gets some.

    Args:
        count: tokens of the pass.
        planned: tokens that the rule goes by, instead of ``count``.
    """
    sequence = parallel.sequence
    if parallel.size == 1 or sequence is None or (count if planned is None else planned) < sequence.least_tokens:
        return EveryToken(parallel, count)
    divided = DividedTokens(parallel.rank, parallel.size, sequence, count)
    return divided if (parallel.size - 1) * divided.each < count else EveryToken(parallel, count)
