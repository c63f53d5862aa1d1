"""Whether a tensor copy may see what a kernel wrote into a tensor map in global memory.

Tensor copies read maps through a proxy of their own. Source: PTX ISA, memory consistency model, proxies, and
``fence.proxy.tensormap``: a map that the kernel writes is

1. written by ``tensormap.replace`` or plain stores, then released by the writer's ``fence.proxy.tensormap::generic
   .release``, or written and released at once by ``tensormap.cp_fenceproxy``;
2. acquired by ``fence.proxy.tensormap::generic.acquire`` on its 128 bytes, in the CTA of the copy and after that.

Before it is written, copies that use it must have been waited for. Launches order everything before them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.sm100.emulator.errors import HazardError

MAP_BYTES = 128
MAP_ALIGNMENT = 64
Agent = tuple[tuple[int, int, int], int]
"""A CTA's index and a warp's in it."""


@dataclass
class Written:
    """The last write to 64 bytes of global memory, and when it was released, if it was."""

    writer: Agent
    released: int | None = None


@dataclass
class TensorMapOrder:
    """Writes, releases and acquires of one launch, in the order in which they took place."""

    clock: int = 0
    written: dict[int, Written] = field(default_factory=dict)
    """Writes of tensor maps, by address over 64."""
    unreleased: dict[Agent, list[Written]] = field(default_factory=dict)
    acquired: dict[tuple[tuple[int, int, int], int], int] = field(default_factory=dict)
    """Time of the last acquire, by CTA and the map's address."""
    in_use: Counter[int] = field(default_factory=Counter)
    """Copies under way, by the map's address."""

    def write(self, address: int, size: int, writer: Agent) -> None:
        """A store to global memory.

        Raises:
            HazardError: copies that use a map there are under way.
        """
        for place in range(address // MAP_ALIGNMENT, -(-(address + size) // MAP_ALIGNMENT)):
            known = self.written.get(place)
            if known is None or known.writer != writer or known.released is not None:
                self.written[place] = known = Written(writer)
                self.unreleased.setdefault(writer, []).append(known)
        for start, count in self.in_use.items():
            if count and start < address + size and address < start + MAP_BYTES:
                raise HazardError(
                    f"write to the tensor map at {start:#x} while {count} copies that use it are under way"
                )

    def release(self, writer: Agent) -> None:
        """All that the writer wrote before may be acquired from now on."""
        self.clock += 1
        for known in self.unreleased.pop(writer, []):
            known.released = self.clock

    def acquire(self, cta: tuple[int, int, int], address: int) -> None:
        """The CTA's copies from now on see what was released before."""
        self.clock += 1
        self.acquired[cta, address] = self.clock

    def begin(self, cta: tuple[int, int, int], address: int) -> None:
        """A copy that uses the map at ``address``.

        Raises:
            HazardError: the map was written and not released since, or not acquired since that.
        """
        places = range(address // MAP_ALIGNMENT, (address + MAP_BYTES) // MAP_ALIGNMENT)
        for known in (self.written[place] for place in places if place in self.written):
            if known.released is None:
                raise HazardError(
                    f"use of the tensor map at {address:#x}, which warp {known.writer[1]} of CTA {known.writer[0]} "
                    "wrote and did not release to the tensormap proxy"
                )
            if self.acquired.get((cta, address), 0) < known.released:
                raise HazardError(f"use of the tensor map at {address:#x}, not acquired since it was written")
        self.in_use[address] += 1

    def end(self, address: int) -> None:
        """A copy has read the map."""
        self.in_use[address] -= 1
        if not self.in_use[address]:
            del self.in_use[address]
