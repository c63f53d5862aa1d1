"""Tilings of the mHC site kernel (:mod:`.site_kernel`), chosen by sizes alone, and the buffers that they need."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.integers import cdiv
from .site_kernel import COLUMNS

MAX_WAITING_WITHOUT_TICKETS = 72
"""Most programs of a launch that may wait without tickets, on a chip that has more multiprocessors than that."""


@dataclass(frozen=True)
class Tiling:
    """The tiling of one launch; mixers, collapsers, balancers and followers are the tasks of :mod:`.site_kernel`.

    Attributes:
        tokens: tokens of a block, which share one read of ``fn``; a power of two, at least 16.
        columns: columns of each stream that a mixer takes at a time; a power of two, at least 8.
        span: most columns of each stream that a mixer takes in all, a multiple of ``columns``. It bounds how much lies
            between a block's mixers and its followers.
        programs: mixers of a launch, if that many are possible.
        ahead: programs between a block's mixers and its followers: so many more than the chip holds at once that
            followers hardly ever wait, but few enough that L2 still holds the block.
        collapsed: tokens of one collapser, a power of two.
        balanced: tokens of one balancer, a power of two.
        warps, stages: Triton's ``num_warps`` and ``num_stages``; a mixer's loop is pipelined.
        registers: most registers of a thread.
    """

    tokens: int
    columns: int = 32
    span: int = 16384
    programs: int = 264
    ahead: int = 400
    collapsed: int = 1
    balanced: int = 1
    warps: int = 8
    stages: int = 2
    registers: int = 128

    def blocks(self, tokens: int) -> int:
        """Blocks of ``tokens`` tokens."""
        return cdiv(tokens, self.tokens)

    def splits(self, tokens: int, d: int) -> tuple[int, int]:
        """The number of splits of d, and the columns of each."""
        steps = cdiv(d, self.columns)
        splits = min(steps, max(1, self.programs // self.blocks(tokens), cdiv(d, self.span)))
        length = cdiv(steps, splits) * self.columns
        return cdiv(d, length), length

    def followers(self, tokens: int, head: bool) -> int:
        """Programs that follow a block's mixers: collapsers, and balancers unless ``head``, the final collapse."""
        largest = min(tokens, self.tokens)
        return cdiv(largest, self.collapsed) + (0 if head else cdiv(largest, self.balanced))

    def lag(self, tokens: int, d: int, head: bool) -> int:
        """Blocks of mixers between a block's own mixers and its followers."""
        programs = self.splits(tokens, d)[0] + self.followers(tokens, head)
        return min(self.blocks(tokens), cdiv(self.ahead, programs))

    def tickets(self, tokens: int, head: bool, processors: int) -> bool:
        """Whether so many programs wait that tasks must be given out in the order in which programs begin.

        Args:
            processors: multiprocessors of the chip, or of the part of it that a process sees.
        """
        waiting = self.blocks(tokens) * self.followers(tokens, head)
        return waiting > MAX_WAITING_WITHOUT_TICKETS or waiting >= processors > 1


TILINGS = (
    (16, Tiling(tokens=16, warps=4, registers=255)),
    (32, Tiling(tokens=16, programs=132, warps=4, registers=255)),
    (128, Tiling(tokens=32, warps=4, registers=255)),
    (256, Tiling(tokens=32, collapsed=2, balanced=16, warps=4, registers=255)),
    (
        None,
        Tiling(
            tokens=64, columns=16, span=128, programs=396, ahead=600, collapsed=4, balanced=32, warps=4, registers=168
        ),
    ),
)
"""(most tokens, tiling), ascending: the fastest of those tried on an H200 at 1 to 8192 tokens of 4096 columns, or one
within 1 % of it (``launch/results/tunings_h200.md``)."""


def choose_tiling(tokens: int) -> Tiling:
    """The tiling for a launch of ``tokens`` tokens."""
    return next(tiling for limit, tiling in TILINGS if limit is None or tokens <= limit)


def workspace_size(tokens: int, d: int) -> int:
    """fp32 values of workspace that suffice for up to ``tokens`` tokens of ``d`` columns."""
    parts = max(
        max(min(tokens, tiling.tokens) * tiling.programs, tokens * cdiv(d, tiling.span)) for _, tiling in TILINGS
    )
    return (parts + tokens) * COLUMNS.value


def semaphores_size(tokens: int) -> int:
    """int32 semaphores that suffice for up to ``tokens`` tokens: the tickets', and one a block."""
    return 1 + cdiv(tokens, min(tiling.tokens for _, tiling in TILINGS))
