"""How the work of an mHC site is laid on a chip, from sizes alone; see ``hyper_connection_site``."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from .site_kernel import COLUMNS

WAITING = 72
"""So many programs may wait without tickets, on a chip of more multiprocessors."""


@dataclass(frozen=True)
class Tiling:
    """Of a launch.

    Attributes:
        tokens: of a block, which share a reading of ``fn``; a power of two, 16 at least.
        columns: of each stream that a mixer takes at a time; a power of two, 8 at least.
        span: of each stream that a mixer takes at most, which bounds what is between a block's mixers and its
            followers; a multiple of ``columns``.
        programs: mixers of a launch, where that many are possible.
        ahead: programs from a block's mixers to its followers; so many more than the chip holds at once that these
            hardly ever wait, but few enough for L2 to hold the block until then.
        collapsed: tokens of one collapser. balanced: of one balancer. Powers of two.
        warps, stages: as Triton's; a mixer is pipelined. registers: of a thread, at most.
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
        return triton.cdiv(tokens, self.tokens)

    def splits(self, tokens: int, d: int) -> tuple[int, int]:
        """Into how many parts d is split, and how long they are."""
        steps = triton.cdiv(d, self.columns)
        parts = min(steps, max(1, self.programs // self.blocks(tokens), triton.cdiv(d, self.span)))
        length = triton.cdiv(steps, parts) * self.columns
        return triton.cdiv(d, length), length

    def followers(self, tokens: int, head: bool) -> int:
        """Collapsers and balancers of a block."""
        largest = min(tokens, self.tokens)
        return triton.cdiv(largest, self.collapsed) + (0 if head else triton.cdiv(largest, self.balanced))

    def lag(self, tokens: int, d: int, head: bool) -> int:
        """Blocks between a block's mixers and its followers."""
        programs = self.splits(tokens, d)[0] + self.followers(tokens, head)
        return min(self.blocks(tokens), triton.cdiv(self.ahead, programs))

    def tickets(self, tokens: int, head: bool, processors: int) -> bool:
        """Whether so many programs wait that tasks must be given out in the order in which programs begin.

        processors: of the chip, or of the part of it that a process sees.
        """
        waiting = self.blocks(tokens) * self.followers(tokens, head)
        return waiting > WAITING or waiting >= processors > 1


TILINGS = (
    (128, Tiling(tokens=16, warps=4, registers=255)),
    (256, Tiling(tokens=32, collapsed=2, balanced=16, warps=4, registers=255)),
    (
        None,
        Tiling(
            tokens=64, columns=16, span=128, programs=396, ahead=600, collapsed=4, balanced=32, warps=4, registers=168
        ),
    ),
)
"""By the most tokens that each is for: the fastest of those tried on an H200 at 1 to 8192 tokens of 4096."""


def choose_tiling(tokens: int) -> Tiling:
    return next(tiling for limit, tiling in TILINGS if limit is None or tokens <= limit)


def workspace_size(tokens: int, d: int) -> int:
    """fp32 values of workspace that are enough for up to ``tokens`` tokens of width ``d``."""
    parts = max(
        max(min(tokens, tiling.tokens) * tiling.programs, tokens * triton.cdiv(d, tiling.span)) for _, tiling in TILINGS
    )
    return (parts + tokens) * COLUMNS.value


def counters_size(tokens: int) -> int:
    """Counters that are enough for up to ``tokens`` tokens."""
    return 1 + triton.cdiv(tokens, min(tiling.tokens for _, tiling in TILINGS))
