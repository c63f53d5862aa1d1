"""Layout of an accumulator's chunk in a warp of the epilogue: 32 weight rows (SM90: 16) by 8, 16 or 32 tokens.

Of each group of 8 tokens thread l has the tokens 2 (l % 4) and 2 (l % 4) + 1 of the rows l / 4 + 8 i, with i from 0 to
3 (SM90: 1): what ``tcgen05.ld.16x256b`` reads, and how wgmma leaves its sums. Two things follow:

* rounded to 16 bits, a thread's two tokens are a register of ``stmatrix.trans``, which writes a token's features next
  to each other;
* in a gated kernel, where a warp's first 16 rows are gates and its last 16 the ups of the same features, a thread has
  both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from .fixed import Fixed
from .shape import TEAM_THREADS, TEAM_WARPS

EPILOGUE_BARRIER = 1
"""Named barrier of the first team."""


@dataclass(frozen=True)
class EpilogueWarp(Fixed):
    """One of the four warps of a team: it holds a quarter of the rows that the team holds.

    Attributes:
        team: which team. quarter: 0 to 3 in it. lane: 0 to 31.
    """

    team: Any
    quarter: Any
    lane: Any

    @property
    def index(self) -> Any:
        """Number among all warps of the epilogue."""
        return self.team * TEAM_WARPS + self.quarter

    def synchronise_team(self) -> None:
        """All threads of the team, over a named barrier of its own."""
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + self.team, number_of_threads=TEAM_THREADS)


def first_value(tokens: int, i: int, group: int) -> int:
    """Index of a thread's value of the first token of a group of 8, of row l / 4 + 8 i; the second token's is the
    next."""
    return i // 2 * (tokens // 2) + group * 4 + i % 2 * 2


def values_of(tokens: int, i: int) -> list[int]:
    """:func:`first_value` for all groups of 8 tokens."""
    return [first_value(tokens, i, group) for group in range(tokens // 8)]


def token_of(lane: Any, group: int) -> Any:
    """A lane's first token of a group of 8."""
    return lane % 4 * 2 + group * 8
