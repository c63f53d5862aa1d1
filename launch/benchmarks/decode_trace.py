"""One decode step of a served model, launch by launch, from a trace of SGLang's profiler (Chrome's format)."""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.profile_report import DEVICE_CATEGORIES, NAME_LENGTH


@dataclass(frozen=True)
class Kernel:
    """A launch: ``begin`` and ``us`` in microseconds, ``graph`` the launch on the host that it belongs to."""

    name: str
    begin: float
    us: float
    graph: int

    @property
    def end(self) -> float:
        return self.begin + self.us


def read(path: Path) -> list[Kernel]:
    """Kernels, copies and fills of a trace, by their begin."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    found = [
        Kernel(str(event["name"]), float(event["ts"]), float(event["dur"]), int(event["args"].get("correlation", 0)))
        for event in events
        if event.get("cat") in DEVICE_CATEGORIES
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def graphs(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The launches of each graph that is as long as the longest, less the first and the last such graph."""
    by_launch: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_launch[kernel.graph].append(kernel)
    longest = max(len(found) for found in by_launch.values())
    whole = [found for found in by_launch.values() if len(found) == longest]
    return whole[1:-1] if len(whole) > 2 else whole


@dataclass(frozen=True)
class Line:
    """A kernel of a step: launches, and per launch the median of its time and of what it adds to the step.

    adds: microseconds from the end of everything before to this one's end; with overlapping launches this is what a
    launch costs, its own time is not.
    """

    name: str
    count: int
    us: float
    adds: float


def short(name: str) -> str:
    """A kernel's name without what CuTeDSL adds to it (hashes, the types of its arguments)."""
    name = re.sub(r"_[0-9a-f]{32,}", "", name)
    return name[:NAME_LENGTH]


def lines(steps: Sequence[Sequence[Kernel]]) -> list[Line]:
    """What the steps' kernels cost, the dearest first."""
    times: dict[str, list[float]] = defaultdict(list)
    added: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        end = step[0].begin
        for kernel in step:
            times[short(kernel.name)].append(kernel.us)
            added[short(kernel.name)].append(max(0.0, kernel.end - end))
            end = max(end, kernel.end)
    found = [
        Line(name, len(times[name]) // len(steps), statistics.mean(times[name]), statistics.mean(added[name]))
        for name in times
    ]
    return sorted(found, key=lambda line: -line.adds * line.count)


def text(path: Path) -> str:
    """The table of a trace's decode steps."""
    steps = graphs(read(path))
    spans = [step[-1].end - step[0].begin for step in steps]
    begins = [step[0].begin for step in steps]
    apart = [later - earlier for earlier, later in pairwise(begins)]
    head = f"{len(steps)} graphs of {len(steps[0])} launches, {statistics.median(spans):.0f} us from begin to end" + (
        f", {statistics.median(apart):.0f} us from one to the next" if apart else ""
    )
    rows = [
        f"{line.count * line.adds:9.1f} {line.count:6} {line.adds:8.2f} {line.us:8.2f}  {line.name}"
        for line in lines(steps)
    ]
    return "\n".join([head, f"{'step, us':>9} {'count':>6} {'adds':>8} {'takes':>8}  kernel", *rows])
