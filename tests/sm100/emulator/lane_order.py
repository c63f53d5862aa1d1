"""Which accesses of a warp's lanes are ordered before the next ones of its other lanes.

Lanes run in step here, but a program may not count on it: between lanes, too, only synchronisation orders accesses to
memory (PTX ISA, ``bar.warp.sync``; ``shfl``, ``vote``, ``elect`` order none). What is tracked are accesses to shared
memory by ld, st, ldmatrix and stmatrix. Of several lanes that read a cell, the last counts.
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.ordering_clock import LANE_MASK, LANE_SHIFT, NOTHING
from tests.sm100.emulator.scalar_types import LANES

UNTOLD, WHOLE = LANES, LANES + 1
"""In place of a lane: an access that counts as in order with the whole warp's, and one that all lanes make together."""
ALWAYS = np.iinfo(np.int64).max


class LaneOrder:
    """The order among the lanes of one warp; limits are those of the warp's own time."""

    def __init__(self) -> None:
        self._known = np.full((LANES, LANES), NOTHING, np.int64)
        """By lane: up to which limit the accesses of each lane are ordered before its next one."""
        self._written = np.zeros(LANES, np.int64)
        """By lane: the limit of its last write."""
        self.floor = NOTHING
        """The limit that every lane knows of every other."""

    def write(self, lanes: np.ndarray, limit: int) -> None:
        """These lanes write."""
        self._written[slice(None) if lanes[0] == WHOLE else lanes] = limit

    def leave(self, lanes: np.ndarray | slice) -> None:
        """These lanes end: what they wrote counts as in order with the others'."""
        self._written[lanes] = 0

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
        """Up to where these lanes know what the others wrote, if that is not all of it."""
        behind = (self._written > self.floor) & ~members
        if not behind.any():
            return None
        known = self._known[members].max(axis=0)
        behind &= self._written > known
        return int(known[behind].min()) if behind.any() else None

    def unordered(self, earlier: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """bool: which accesses of this warp, by epoch, are not ordered before one that ``lanes`` make now."""
        table = np.full((LANES + 2, LANES + 2), ALWAYS)
        others = self._others()
        table[:LANES, :LANES] = others
        table[WHOLE, :LANES], table[:LANES, WHOLE] = others.min(axis=0), others.min(axis=1)
        return table[lanes, earlier >> LANE_SHIFT & LANE_MASK] < earlier
