"""Tensor-parallel ranks as threads of which one at a time runs.

Triton's interpreter is not made for threads, so the ranks hand over to each other in turn, and do so only where they
would exchange anything, in ``all_reduce``. That adds as a collective does: in fp32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import torch
from torch import Tensor

from nvfp4_sgl.weights.parallel import Collective, TensorParallel


class Exchange:
    """Sums of what all ranks give; only the rank whose turn it is runs."""

    def __init__(self, size: int = 2) -> None:
        self._turn = 0
        self._changed = Condition()
        self.given: tuple[list[Tensor], ...] = tuple([] for _ in range(size))

    @property
    def ranks(self) -> list[TensorParallel]:
        return [TensorParallel(rank, len(self.given), self.all_reduce(rank)) for rank in range(len(self.given))]

    def all_reduce(self, rank: int) -> Callable[[Collective, Tensor], Tensor]:
        def reduce(collective: Collective, part: Tensor) -> Tensor:
            self.given[rank].append(part)
            place = len(self.given[rank]) - 1
            self.hand_over(rank)
            self.wait(rank)
            return torch.stack([given[place].float() for given in self.given]).sum(0).to(part.dtype)

        return reduce

    def wait(self, rank: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == rank, timeout=300)

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
            finally:
                self.hand_over(rank)

        with ThreadPoolExecutor(len(self.given)) as threads:
            return list(threads.map(of_rank, range(len(self.given))))
