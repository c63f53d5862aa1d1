"""Tensor-parallel ranks as threads of which one at a time runs.

Triton's interpreter is not made for threads, so the ranks hand over to each other, and do so only where they would
exchange anything, in ``all_reduce``. That adds two bf16 tensors as a collective does: one sum, rounded once to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

from torch import Tensor

from nvfp4_sgl.weights.parallel import Collective

RANKS = (0, 1)


class Exchange:
    """Sums of what both ranks give; only the rank whose turn it is runs."""

    def __init__(self) -> None:
        self._turn = 0
        self._changed = Condition()
        self.given: tuple[list[Tensor], list[Tensor]] = ([], [])

    def all_reduce(self, rank: int) -> Callable[[Collective, Tensor], Tensor]:
        def reduce(collective: Collective, part: Tensor) -> Tensor:
            self.given[rank].append(part)
            place = len(self.given[rank]) - 1
            self.hand_over(rank)
            self.wait(rank)
            return self.given[0][place] + self.given[1][place]

        return reduce

    def wait(self, rank: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == rank, timeout=300)

    def hand_over(self, rank: int) -> None:
        with self._changed:
            self._turn = 1 - rank
            self._changed.notify_all()

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        """``work(rank)`` of both, in two threads."""

        def of_rank(rank: int) -> Tensor:
            self.wait(rank)
            try:
                return work(rank)
            finally:
                self.hand_over(rank)

        with ThreadPoolExecutor(len(RANKS)) as threads:
            return list(threads.map(of_rank, RANKS))
