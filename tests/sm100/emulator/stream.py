"""Launches one after the other, or overlapping where programmatic dependent launch allows it.

Source: PTX ISA, ``griddepcontrol``; CUDA programming guide, programmatic dependent launch. A launch with the attribute
may begin once each CTA of the one before has executed ``griddepcontrol.launch_dependents`` or exited. Until it executes
``griddepcontrol.wait`` it may count on nothing that the one before does: not even on its end. If each CTA of that one
waited before it triggered, what that one waited for has ended.

Here it begins at about that earliest moment, and it goes on before the rest of those before it, which do so only when
it cannot (at random moments, too, in the shuffled modes). All its clusters count as resident. Accesses to global memory
of launches that run side by side must not conflict (``SharedAccess``), whichever comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.sm100.emulator.engines import Options
from tests.sm100.emulator.errors import DeadlockError, HazardError
from tests.sm100.emulator.launch import Launch
from tests.sm100.emulator.memory import GlobalMemory, Range

READ, WRITTEN = 1, 2
CHANCE = 0.2
"""Chance that an earlier launch goes on after a round of a later one, in the shuffled modes."""


@dataclass
class SharedAccess(GlobalMemory):
    """Global memory as a launch accesses it that others may run beside.

    Attributes:
        name: of the launch, for messages.
        others: those of the launches that may run beside it, this one included.
        after: by name, the launches that have ended, as far as this one knows: it waited for their end, or began after
            it.
    """

    name: str = ""
    others: list[SharedAccess] = field(default_factory=list)
    after: set[str] = field(default_factory=set)
    _touched: dict[int, np.ndarray] = field(default_factory=dict)
    """READ and WRITTEN for each byte, by the begin of the range."""

    def touch(self, known: Range, where: slice | np.ndarray, write: bool) -> None:
        """Note an access.

        Raises:
            HazardError: a launch beside this one writes what is accessed, or reads what is written.
        """
        cells = np.arange(where.start, where.stop)[None] if isinstance(where, slice) else where
        for other in self.others:
            if other is self or other.name in self.after:
                continue
            for start, flags in other._touched.items():
                # The other launch may know this memory by a range that begins and ends elsewhere.
                there = cells + (known.start - start)
                inside = (there >= 0) & (there < len(flags))
                if not inside.any():
                    continue
                found = np.where(inside, flags[there * inside], 0)
                if (found & WRITTEN).any() or (write and found.any()):
                    row = int(np.argmax(found.any(axis=1)))
                    written = "writes" if (found & WRITTEN).any() else "reads"
                    raise HazardError(
                        f"{'write' if write else 'read'} of {cells.shape[1]} B at {known.name}+{cells[row, 0]}, which "
                        f"{other.name} {written}, without griddepcontrol.wait between them"
                    )
        flags = self._touched.setdefault(known.start, np.zeros(known.end - known.start, np.uint8))
        flags[where] |= WRITTEN if write else READ


@dataclass
class Stream:
    """Launches in order; ``running`` are those since the host last waited, oldest first."""

    options: Options
    running: list[Launch] = field(default_factory=list)
    accesses: list[SharedAccess] = field(default_factory=list)
    """One for each running launch."""
    count: int = 0

    def memory(self, memory: GlobalMemory) -> GlobalMemory:
        """What the next launch is to be given as global memory."""
        self.count += 1
        if not self.options.overlap:
            return memory
        return SharedAccess(memory.ranges, f"launch {self.count}", self.accesses)

    def submit(self, launch: Launch, programmatic: bool) -> None:
        """Run a launch to its end, or with ``overlap`` until a dependent one may begin.

        Args:
            launch: made with ``memory``.
            programmatic: whether it may begin before the one before has ended.
        """
        if not self.options.overlap:
            launch.run()
            return
        if not programmatic:
            self.synchronize()
        assert isinstance(launch.memory, SharedAccess)
        if self.running:
            launch.before = self.running[-1]
            if launch.before.triggered_after_wait:
                launch.memory.after |= self.accesses[-1].after
        launch.begin(self._waited)
        self.running.append(launch)
        self.accesses.append(launch.memory)
        self._run(launch, lambda: launch.triggered)

    def synchronize(self) -> None:
        """Run all launches to their end."""
        for launch in reversed(self.running):
            self._run(launch, lambda launch=launch: launch.done)  # type: ignore[misc]
        self.running.clear()
        self.accesses.clear()

    @staticmethod
    def _waited(launch: Launch, before: Launch) -> None:
        """``launch`` has waited for the end of ``before``, and so for what that had waited for."""
        assert isinstance(launch.memory, SharedAccess) and isinstance(before.memory, SharedAccess)
        launch.memory.after |= {before.memory.name, *before.memory.after}

    def _run(self, launch: Launch, reached: Callable[[], bool]) -> None:
        """Advance ``launch``; those before it only when it cannot go on."""
        while not reached():
            before = launch.before
            if launch.advance():
                shuffled = self.options.mode != "immediate"
                if shuffled and before is not None and not before.done and launch.random.random() < CHANCE:
                    before.advance()
            elif launch.stuck:
                if before is None or before.done:
                    raise DeadlockError(launch.report())
                self._run(before, lambda before=before: before.done)  # type: ignore[misc]
                launch.retry()
