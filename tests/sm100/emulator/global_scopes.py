"""Whether atomics and other strong accesses to global memory have scopes that include one another's threads.

Two that conflict and have not are a race, however they are ordered (PTX ISA, morally strong operations). Accesses to
global memory are not checked otherwise within a launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.sm100.emulator.errors import HazardError

if TYPE_CHECKING:
    from tests.sm100.emulator.cluster import Cta


@dataclass(frozen=True)
class StrongAccess:
    """Who accessed a word with which scope, and whether to write."""

    cta: Cta
    scope: str
    writes: bool

    @property
    def wide(self) -> bool:
        """Whether its scope includes all threads of the launch."""
        return self.scope not in ("cta", "cluster")

    def includes(self, other: StrongAccess) -> bool:
        """Whether the other one's threads are within its scope."""
        return self.wide or self.cta is other.cta or (self.scope == "cluster" and self.cta.cluster is other.cta.cluster)


@dataclass
class GlobalScopes:
    """The strong accesses of a launch, by word: all narrow ones, and of wide ones those of the first two CTAs."""

    _known: dict[int, list[StrongAccess]] = field(default_factory=dict)

    def access(self, word: int, access: StrongAccess) -> None:
        """Record one.

        Raises:
            HazardError: an earlier one conflicts, and one's scope leaves out the other's CTA.
        """
        known = self._known.setdefault(word, [])
        if access in known:
            return
        for other in known:
            if (access.writes or other.writes) and not (access.includes(other) and other.includes(access)):
                raise HazardError(
                    f"access with scope .{access.scope} to the global word at {word:#x}, which {other.cta} accesses "
                    f"with scope .{other.scope}: too narrow for both to count as ordered"
                )
        if not access.wide or len({other.cta for other in known if other.wide} - {access.cta}) < 2:
            known.append(access)
