"""The accesses that matter to later ones: for each cell of a memory its last write and the reads since.

Two accesses to a cell, one of them a write, must be ordered by the memory's rule, unless both are strong and of scopes
that include each other's threads. This is checked whenever the later one is recorded, so the report does not depend on
the schedule that led to the race.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.sm100.emulator.actors import Actor, Strength
from tests.sm100.emulator.errors import HazardError
from tests.sm100.emulator.lane_order import UNTOLD
from tests.sm100.emulator.ordering_clock import AGENT_MASK, LANE_SHIFT, ORDER, REACHING, STRONG

Index = np.ndarray | slice
Where = Index | tuple[Index, Index]
"""Cells of a memory of one or two dimensions."""


@dataclass(frozen=True)
class Rule:
    """What orders accesses: the limits, by agent, of the writes and of the reads that an actor comes after."""

    writes: Callable[[Actor], np.ndarray]
    reads: Callable[[Actor], np.ndarray]
    hint: str
    """What is missing where an access happened before without being covered."""


SHARED_RULE = Rule(Actor.visible, Actor.ordered, "without fence.proxy.async since")
TENSOR_RULE = Rule(Actor.tensor_ordered, Actor.tensor_ordered, "without tcgen05.fence on both sides since")


def _stamp(actor: Actor, strength: Strength, lanes: np.ndarray | None) -> np.ndarray | int:
    """The epochs of an access, of the shape of ``lanes``."""
    epoch = actor.epoch(strength)
    return epoch if lanes is None else epoch ^ UNTOLD << LANE_SHIFT | lanes.astype(np.int64) << LANE_SHIFT


class AccessHistory:
    """Accesses to the cells of one memory; ``name`` and ``scale``, the size of a cell, are for reports.

    Concurrent reads of a cell are kept in layers, as many as ever read a cell at once without order. ``lanes`` of an
    access, of a shape that fits its cells, say which lane of the actor makes it (``lane_order``); without them the
    order among lanes is not checked.
    """

    def __init__(self, shape: tuple[int, ...], name: str, rule: Rule, scale: tuple[int, ...] = (1,)) -> None:
        self.name, self.rule, self.scale = name, rule, scale
        self._writes = np.zeros(shape, np.int64)
        self._reads = [np.zeros(shape, np.int64)]

    def read(self, where: Where, actor: Actor, strength: Strength = "weak", lanes: np.ndarray | None = None) -> None:
        """Record a read.

        Raises:
            HazardError: the last write of a cell is not ordered before, or not visible to the actor's proxy.
        """
        self._check(self._writes[where], where, actor, self.rule.writes(actor), strength, "read", "write", lanes)
        epoch, ordered = _stamp(actor, strength, lanes), self.rule.reads(actor)
        remaining: np.ndarray | None = None
        for layer in self._reads:
            earlier = layer[where]
            replaced = ordered[earlier & AGENT_MASK] >= earlier
            if remaining is not None:
                replaced &= remaining
            if np.count_nonzero(replaced) == replaced.size:
                layer[where] = epoch
                return
            layer[where] = np.where(replaced, epoch, earlier)
            remaining = ~replaced if remaining is None else remaining & ~replaced
            if not np.count_nonzero(remaining):
                return
        self._reads.append(np.zeros_like(self._writes))
        self._reads[-1][where] = np.where(True if remaining is None else remaining, epoch, 0)

    def write(
        self, where: Where, actor: Actor, strength: Strength = "weak", lanes: np.ndarray | None = None,
        same: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Record a write; ``same`` are cells that it leaves as they are, which another write may do at any time.

        Raises:
            HazardError: as for reads, or an earlier read of a cell is not ordered before.
        """
        writes = self._writes[where]
        if same is not None:
            writes = np.where(same, 0, writes)
        self._check(writes, where, actor, self.rule.writes(actor), strength, "write", "write", lanes)
        ordered = self.rule.reads(actor)
        for layer in self._reads:
            reads = layer[where]
            if not np.count_nonzero(reads):
                continue
            self._check(reads, where, actor, ordered, strength, "write", "read", lanes)
            layer[where] = 0 if strength == "weak" else np.where(ordered[reads & AGENT_MASK] >= reads, 0, reads)
        self._writes[where] = _stamp(actor, strength, lanes)

    def retire(self, where: Where, actor: Actor) -> None:
        """Cells are given back: nothing before is remembered.

        Raises:
            HazardError: an access has not happened before.
        """
        for epochs, before in ((self._writes, "write"), *((layer, "read") for layer in self._reads)):
            self._check(epochs[where], where, actor, actor.finished(), "weak", "release", before, None)
            epochs[where] = 0

    def _check(
        self, earlier: np.ndarray, where: Where, actor: Actor, limits: np.ndarray, strength: Strength, now: str,
        before: str, lanes: np.ndarray | None,
    ) -> None:  # fmt: skip
        unordered = limits[earlier & AGENT_MASK] < earlier
        if actor.lane_view is not None:
            unordered &= ~actor.excused(earlier, before == "write")
        if lanes is not None:
            unordered |= actor.between_lanes(earlier, lanes)
        if strength != "weak" and np.count_nonzero(unordered):
            ranks = actor.agents.ranks
            within = ranks[earlier & AGENT_MASK] == ranks[actor.number]
            reaching = strength == "reaching" and earlier & REACHING != 0
            unordered &= (earlier & STRONG == 0) | ~(within | reaching)
        if not np.count_nonzero(unordered):
            return
        first = np.unravel_index(int(np.argmax(unordered)), unordered.shape)
        epoch = int(earlier[first])
        missing, agents = "without being ordered after", actor.agents
        if lanes is not None and actor.between_lanes(earlier, lanes)[first]:
            missing = "by another lane without bar.warp.sync since"
        elif actor.clock.covers(epoch, ORDER):
            missing = self.rule.hint
        raise HazardError(
            f"{now} of {self.name} at {self._place(where, first)} {missing} its {before}\n"
            f"  by {agents.describe(actor.epoch())}\n"
            f"  {before} by {agents.describe(epoch)}"
        )

    def _place(self, where: Where, index: tuple[np.intp, ...]) -> str:
        parts = where if isinstance(where, tuple) else (where,)
        if all(isinstance(part, slice) for part in parts):
            places = [(part.start or 0) + int(step) for part, step in zip(parts, index, strict=True)]
        else:
            places = [int(part[index]) for part in np.broadcast_arrays(*parts)]
        return ", ".join(str(place * size) for place, size in zip(places, self.scale, strict=True))
