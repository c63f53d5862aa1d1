"""The report of ``launch/bench_kernels``: floors, judged peers, table rows and the closing summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.families import Case, Peer

GOAL = 0.85
"""Share of the floor that a case of ``GOAL_TOKENS`` or more must reach."""
GOAL_TOKENS = 8192
HEADER = (
    "| case | us | MB | GFLOP | floor us (by) | of floor | over empty us | best peer (theirs / ours) | others |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)

Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Chip:
    """The bounds of a kernel: measured bytes and bf16 operations a second, and the time of an empty kernel."""

    name: str
    bandwidth: float
    rate: float
    empty_us: float

    def floor(self, case: Case) -> tuple[float, str]:
        """Microseconds that ``case`` takes at least, and what binds it: ``bytes`` or ``flops``."""
        moved, computed = case.bytes / self.bandwidth * 1e6, case.flops / self.rate * 1e6
        return (computed, "flops") if computed > moved else (moved, "bytes")


@dataclass(frozen=True)
class Judged:
    """A peer's time, or why it has none."""

    us: float | None = None
    problem: str = ""
    part: bool = False


@dataclass(frozen=True)
class Row:
    """A case with its time; ``us`` is ``None`` and ``problem`` says why if it failed."""

    family: str
    case: str
    tokens: int
    bytes: int
    flops: int
    floor_us: float
    bound: str
    us: float | None = None
    problem: str = ""
    peers: dict[str, Judged] = field(default_factory=dict)

    @property
    def of_floor(self) -> float:
        """1 at the floor, less above it; 0 if it failed."""
        return self.floor_us / self.us if self.us else 0.0

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """The fastest peer that does the whole job."""
        times = [(judged.us, name) for name, judged in self.peers.items() if judged.us is not None and not judged.part]
        return (min(times)[1], min(times)[0]) if times else None

    def line(self, empty_us: float) -> str:
        ours, best = self.us, self.best_peer
        if ours is None:
            return f"| {self.case} | failed: {self.problem} | | | | | | | |"

        def compared(name: str, us: float) -> str:
            return f"{name} {us:.1f} ({us / ours:.2f}x)"

        others = [
            f"{name}: {judged.problem}" if judged.us is None else compared(name, judged.us)
            for name, judged in self.peers.items()
            if best is None or name != best[0]
        ]
        return (
            f"| {self.case} | {ours:.1f} | {self.bytes / 1e6:.2f} | {self.flops / 1e9:.2f}"
            f" | {self.floor_us:.1f} ({self.bound}) | {self.of_floor:.0%} | {ours - empty_us:.1f}"
            f" | {compared(*best) if best else ''} | {'; '.join(others)} |"
        )

    def as_json(self) -> dict[str, Any]:
        best = self.best_peer
        return asdict(self) | {"of_floor": self.of_floor, "best_peer": best[0] if best else None}


def describe(error: Exception) -> str:
    """Type and first line, short enough for a table cell."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}".replace("|", "/")


def judge(peer: Peer | Callable[[], object], ours: Callable[[], object], time: Timer) -> Judged:
    """Compare a peer with ours, then time it; whatever it raises is its result."""
    if not isinstance(peer, Peer):
        peer = Peer(peer)
    try:
        if peer.error is not None:
            ours()
            peer.run()
            error = peer.error()
            if math.isnan(error) or error > peer.limit:
                return Judged(problem=f"disagrees: relative error {error:.2g} beyond {peer.limit:.2g}", part=peer.part)
        return Judged(us=time(peer.run), part=peer.part)
    except Exception as error:
        return Judged(problem=describe(error), part=peer.part)


def measure(family: str, case: Case, chip: Chip, time: Timer, *, without: str | None = None) -> Row:
    """Time ``case``, then its peers (those whose names hold ``without`` stay out), each apart from others' failures."""
    floor_us, bound = chip.floor(case)
    row = Row(family, case.name, case.tokens, case.bytes, case.flops, floor_us, bound)
    try:
        us = time(case.run)
    except Exception as error:
        return Row(**{**vars(row), "problem": describe(error)})
    peers = {name: peer for name, peer in case.peers.items() if without is None or without not in name}
    judged = {name: judge(peer, case.run, time) for name, peer in peers.items()}
    return Row(**{**vars(row), "us": us, "peers": judged})


def summary(rows: list[Row]) -> Iterator[str]:
    """Summarise the cases that miss a goal, or could not be measured or compared."""
    measured = [row for row in rows if row.us is not None]
    yield f"{len(measured)} of {len(rows)} cases measured"
    groups = {
        "failed": [f"{row.case}: {row.problem}" for row in rows if row.us is None],
        f"below {GOAL:.0%} of the floor at {GOAL_TOKENS} tokens or more": [
            f"{row.case}: {row.of_floor:.0%}" for row in measured if row.tokens >= GOAL_TOKENS and row.of_floor < GOAL
        ],
        "slower than a peer": [
            f"{row.case}: {name} {us / row.us:.2f}x"
            for row in measured
            if row.us is not None and row.best_peer is not None
            for name, us in [row.best_peer]
            if us < row.us
        ],
        "peers without a time": sorted(
            {
                f"{row.family}, {name}: {judged.problem}"
                for row in rows
                for name, judged in row.peers.items()
                if judged.problem
            }
        ),
    }
    for title, lines in groups.items():
        yield f"{title}: {len(lines) or 'none'}"
        yield from (f"  {line}" for line in lines)
