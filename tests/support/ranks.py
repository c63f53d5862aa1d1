"""Tensor-parallel ranks as threads of which one at a time runs.

Triton's interpreter is not made for threads, so the ranks hand over to each other in turn, and do so only where they
would exchange anything, in a collective. Sums are as a collective's: in fp32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Condition

import torch
from torch import Tensor

from nvfp4_sgl.targets.fused.exchange import exchange_of
from nvfp4_sgl.triton_kernels.common.inbox import EMPTY, Inbox, empty_inbox
from nvfp4_sgl.weights.parallel import SEQUENCE_PARALLEL_TOKENS, Collective, SequenceParallel, TensorParallel


@dataclass(frozen=True)
class PushingRanks:
    """Ranks that push parts into ``inboxes``, one a rank. They hand over before a site waits for the others' parts."""

    exchange: Exchange
    ranks: list[TensorParallel]
    inboxes: list[Tensor]

    def inbox(self, parts: Tensor) -> Inbox:
        """Stands for :class:`Inbox` where sites make one."""
        (rank,) = (
            rank
            for rank, inbox in enumerate(self.inboxes)
            if parts.untyped_storage().data_ptr() == inbox.untyped_storage().data_ptr()
        )
        self.exchange.hand_over(rank)
        self.exchange.wait(rank)
        return Inbox(parts)

    @property
    def are_empty(self) -> bool:
        return all(bool((inbox == EMPTY.value).all()) for inbox in self.inboxes)


class Exchange:
    """What all ranks give; only the rank whose turn it is runs.

    Args:
        size: how many ranks.
        least_tokens: of the smallest pass whose tokens are divided.
    """

    def __init__(self, size: int = 2, least_tokens: int = SEQUENCE_PARALLEL_TOKENS) -> None:
        self._turn, self._least_tokens = 0, least_tokens
        self._failure: BaseException | None = None
        self._changed = Condition()
        self.given: tuple[list[Tensor], ...] = tuple([] for _ in range(size))

    @property
    def ranks(self) -> list[TensorParallel]:
        return [self._rank(rank) for rank in range(len(self.given))]

    def _rank(self, rank: int) -> TensorParallel:
        size = len(self.given)

        def all_reduce(collective: Collective, part: Tensor) -> Tensor:
            return torch.stack([given.float() for given in self.exchange(rank, part)]).sum(0).to(part.dtype)

        def reduce_scatter(collective: Collective, part: Tensor) -> Tensor:
            return all_reduce(collective, part).unflatten(0, (size, -1))[rank].clone()

        def all_gather(own: Tensor) -> Tensor:
            return torch.cat(self.exchange(rank, own))

        return TensorParallel(rank, size, all_reduce, SequenceParallel(reduce_scatter, all_gather, self._least_tokens))

    def exchange(self, rank: int, part: Tensor) -> list[Tensor]:
        """What every rank gives in this place, the same for all."""
        self.given[rank].append(part.clone())
        place = len(self.given[rank]) - 1
        self.hand_over(rank)
        self.wait(rank)
        return [given[place] for given in self.given]

    def pushing(self, tokens: int, d: int, device: str) -> PushingRanks:
        """The same ranks, which push parts of passes of up to ``tokens`` tokens."""
        inboxes = [empty_inbox(len(self.given), tokens, d, device) for _ in self.given]
        ranks = [replace(rank, exchange=exchange_of(rank.rank, inboxes)) for rank in self.ranks]
        return PushingRanks(self, ranks, inboxes)

    def wait(self, rank: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._failure or self._turn == rank, timeout=300)
            if self._failure:
                raise RuntimeError("another rank has failed") from self._failure

    def hand_over(self, rank: int) -> None:
        with self._changed:
            self._turn = (rank + 1) % len(self.given)
            self._changed.notify_all()

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """``work(rank)`` of all, in a thread each."""

        def of_rank(rank: int) -> Tensor:
            self.wait(rank)
            try:
                return work(rank)
            except BaseException as error:
                self._failure = self._failure or error
                raise
            finally:
                self.hand_over(rank)

        with ThreadPoolExecutor(len(self.given)) as threads:
            return list(threads.map(of_rank, range(len(self.given))))
