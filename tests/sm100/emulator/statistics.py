"""What a launch did: instructions by opcode and warp, bytes by engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.sm100.emulator.timing import Timeline


@dataclass
class Statistics:
    """Counts of one launch over all its CTAs.

    ``instructions`` counts warp instructions by (warp index in its CTA, opcode), guarded-off ones excluded.
    ``engine_bytes`` counts by engine name; ``engine_operations`` likewise. A multicast load counts its global
    bytes once and its shared bytes once per destination (``tma_load`` and ``tma_load_shared``). ``timelines`` has one
    entry for each cluster where time is modelled.
    """

    instructions: Counter[tuple[int, str]] = field(default_factory=Counter)
    engine_bytes: Counter[str] = field(default_factory=Counter)
    engine_operations: Counter[str] = field(default_factory=Counter)
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Warp instructions executed."""
        return self.instructions.total()

    def by_opcode(self) -> Counter[str]:
        """Warp instructions by opcode."""
        counts: Counter[str] = Counter()
        for (_, opcode), number in self.instructions.items():
            counts[opcode] += number
        return counts

    def by_role(self, roles: Mapping[str, Iterable[int]]) -> dict[str, Counter[str]]:
        """Warp instructions by opcode for each role, a role being a name and its warp indices.

        Raises:
            ValueError: a warp executed something and belongs to no role.
        """
        owner = {warp: role for role, warps in roles.items() for warp in warps}
        counts: dict[str, Counter[str]] = {role: Counter() for role in roles}
        for (warp, opcode), number in self.instructions.items():
            if warp not in owner:
                raise ValueError(f"warp {warp} belongs to no role of {sorted(roles)}")
            counts[owner[warp]][opcode] += number
        return counts
