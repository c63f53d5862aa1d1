"""Which accesses of a warp's lanes are ordered before the next ones of its other lanes.

Lanes run in step here, but a program may not count on it: between lanes, too, only synchronisation orders accesses to
memory (PTX ISA, ``bar.warp.sync``; ``shfl``, ``vote``, ``elect`` order none). What is tracked are accesses to shared
memory by ld, st, ldmatrix and stmatrix. Of several lanes that read a cell, the last counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.sm100.emulator.ordering_clock import AGENT_MASK, LANE_MASK, LANE_SHIFT, NOTHING
from tests.sm100.emulator.scalar_types import LANES

UNTOLD, WHOLE = LANES, LANES + 1
"""What stands for a lane: an access in order with the whole warp's, and one that all lanes make together."""
ALWAYS = np.iinfo(np.int64).max


@dataclass(frozen=True)
class LaneView:
    """What a lane knew of its warp's accesses when it issued an operation.

    Attributes:
        numbers: the agents that the warp's accesses count as.
        known: by lane, the limit of what had happened before.
        proxy: the limit of what a proxy fence had made visible to asynchronous operations.
    """

    numbers: list[int]
    known: np.ndarray
    proxy: int

    def covers(self, earlier: np.ndarray, proxy: bool) -> np.ndarray:
        """bool: which accesses, by epoch, are the warp's and known; ``proxy`` asks for a proxy fence, too."""
        limits = self.known[earlier >> LANE_SHIFT & LANE_MASK]
        limits = np.minimum(limits, self.proxy) if proxy else limits
        return np.isin(earlier & AGENT_MASK, self.numbers) & (earlier <= limits)


class LaneOrder:
    """The order among the lanes of one warp; limits are those of the warp's own time."""

    def __init__(self) -> None:
        self._known = np.full((LANES, LANES), NOTHING, np.int64)
        """By lane: up to which limit the accesses of each lane are ordered before its next one."""
        self._accessed = np.zeros(LANES, np.int64)
        """By lane: the limit of its last access."""
        self.floor = NOTHING
        """The limit that every lane knows of every other."""

    def access(self, lanes: np.ndarray, limit: int) -> None:
        """These lanes access shared memory."""
        self._accessed[slice(None) if lanes[0] == WHOLE else lanes] = limit

    def leave(self, lanes: np.ndarray | slice) -> None:
        """These lanes end: what they did counts as in order with the others'."""
        self._accessed[lanes] = 0

    def synchronise(self, members: np.ndarray, limit: int) -> None:
        """What these lanes did up to now is ordered before what any of them does from now on."""
        if members.all():
            self._known[:], self.floor = limit, limit
            return
        shared = self._known[members].max(axis=0)
        shared[members] = limit
        self._known[members] = np.maximum(self._known[members], shared)
        self._lift()

    def learn(self, members: np.ndarray | slice, limit: int) -> None:
        """These lanes have learnt from elsewhere that the warp's accesses up to a limit have happened."""
        if limit > self.floor:
            self._known[members] = np.maximum(self._known[members], limit)
            self._lift()

    def _lift(self) -> None:
        self.floor = int(self._others().min())

    def _others(self) -> np.ndarray:
        """``_known``, with each lane knowing itself."""
        known = self._known.copy()
        np.fill_diagonal(known, ALWAYS)
        return known

    def limit(self, members: np.ndarray) -> int | None:
        """Up to where these lanes know what the others accessed, if that is not all of it."""
        behind = (self._accessed > self.floor) & ~members
        if not behind.any():
            return None
        known = self._known[members].max(axis=0)
        behind &= self._accessed > known
        return int(known[behind].min()) if behind.any() else None

    def view(self, lane: int, numbers: list[int], limit: int, proxy: int) -> LaneView:
        """What a lane knows now: its own accesses up to ``limit``, those of others since they last synchronised."""
        known = np.full(LANES + 2, limit)
        known[:LANES] = self._known[lane]
        known[WHOLE] = np.delete(self._known[lane], lane).min()
        known[lane] = limit
        return LaneView(numbers, known, proxy)

    def unordered(self, earlier: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """bool: which accesses of this warp, by epoch, are not ordered before one that ``lanes`` make now."""
        table = np.full((LANES + 2, LANES + 2), ALWAYS)
        others = self._others()
        table[:LANES, :LANES] = others
        table[WHOLE, :LANES], table[:LANES, WHOLE] = others.min(axis=0), others.min(axis=1)
        return table[lanes, earlier >> LANE_SHIFT & LANE_MASK] < earlier
