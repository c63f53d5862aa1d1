"""The report of ``launch/profile_decoder`` on a trace."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitk|grouped", re.IGNORECASE)
NAME_LENGTH = 90


def device_events(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Name and microseconds of what ran on the device, by its beginning; from the events of a Chrome trace."""
    found = [event for event in events if event.get("cat") in DEVICE_CATEGORIES]
    return [(str(event["name"]), float(event["dur"])) for event in sorted(found, key=lambda event: event["ts"])]


def median_launches(events: Sequence[tuple[str, float]], repeats: int) -> list[tuple[str, float]]:
    """Each launch of a run, with the median of its times over ``repeats`` runs one after another.

    Raises:
        ValueError: the runs launched nothing, or different things.
    """
    count = len(events) // repeats
    names = [name for name, _ in events]
    if not names or names != names[:count] * repeats:
        raise ValueError(f"expected {repeats} equal runs, found {len(events)} launches: {names[: count + 1]} ...")
    return [(names[i], statistics.median(us for _, us in events[i::count])) for i in range(count)]


@dataclass(frozen=True)
class Launch:
    """``kind``: ``product``, ``ours``, or ``neither``."""

    name: str
    us: float
    kind: str


@dataclass(frozen=True)
class Section:
    """A part of a pass, and its launches in order.

    us: from its begin to its end, where that was timed. Launches overlap: a kernel's own time contains its waiting for
    the one before.
    """

    title: str
    part: str
    launches: list[Launch]
    us: float | None = None

    @classmethod
    def of(
        cls, title: str, part: str, found: Sequence[tuple[str, float]], ours: set[str], us: float | None = None
    ) -> Section:
        return cls(title, part, [Launch(name, us, kind_of(name, ours)) for name, us in found], us)

    def text(self) -> str:
        """A heading with counts and times, then a line for each launch."""
        counts = []
        for kind in ("product", "ours", "neither"):
            times = [launch.us for launch in self.launches if launch.kind == kind]
            counts.append(f"{len(times)} {kind} ({sum(times):.1f} us)")
        timed = "" if self.us is None else f" in {self.us:.1f} us"
        heading = f"{self.title}, {self.part}: {len(self.launches)} launches{timed}: {', '.join(counts)}"
        lines = [f"{launch.us:9.1f}  {launch.kind:8}  {launch.name[:NAME_LENGTH]}" for launch in self.launches]
        return "\n".join([heading, *lines])


def kind_of(name: str, ours: set[str]) -> str:
    if name.rsplit(".", 1)[-1] in ours:
        return "ours"
    return "product" if PRODUCT.search(name) else "neither"
