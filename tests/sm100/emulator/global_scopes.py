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

    def includes(self, other: StrongAccess) -> bool:
        """Whether the other one's threads are within its scope."""
        if self.scope == "cluster":
            return self.cta.cluster is other.cta.cluster
        return self.scope != "cta" or self.cta is other.cta


@dataclass
class GlobalScopes:
    """The strong accesses of a launch, by word."""

    _known: dict[int, set[StrongAccess]] = field(default_factory=dict)

    def access(self, word: int, access: StrongAccess) -> None:
        """Record one.

        Raises:
            HazardError: an earlier one conflicts, and one's scope leaves out the other's CTA.
        """
        known = self._known.setdefault(word, set())
        if access in known:
            return
        for other in known:
            if (access.writes or other.writes) and not (access.includes(other) and other.includes(access)):
                raise HazardError(
                    f"access with scope .{access.scope} to the global word at {word:#x}, which {other.cta} accesses "
                    f"with scope .{other.scope}: too narrow for both to count as ordered"
                )
        known.add(access)
