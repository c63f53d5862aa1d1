"""One decode step of a served model, launch by launch, from a trace of SGLang's profiler (Chrome's format).

A launch adds to a step the microseconds from the end of everything before it to its own end; with overlapping launches
this is what it costs, its own time is not. Its gap is the part of that in which nothing ran. The floor of a GEMM is its
weights, read at a copy's bandwidth.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.profile_report import DEVICE_CATEGORIES, NAME_LENGTH
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.weights.gemms import GemmSpec, launched_gemms
from nvfp4_sgl.weights.parallel import Ownership

GEMM = "W4A16Gemm"
"""What the name of each of our GEMMs on Hopper contains."""
BYTES_PER_WEIGHT = 0.5 + 1 / 16
"""A code of NVFP4, and its share of a block scale."""
DRAFT = "(the draft's)"
"""Name of a GEMM behind those of the model."""
COPY_BYTES_PER_US = 4.25e6
"""Bytes that a copy on an H200 reads and writes in a microsecond, as measured in several runs."""


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
    """A kernel of a step: its launches, and the means of their times, what they add to the step, and their gaps."""

    name: str
    count: int
    us: float
    adds: float
    gap: float


def short(name: str) -> str:
    """A kernel's name without what CuTeDSL adds to it (hashes, the types of its arguments)."""
    name = re.sub(r"_[0-9a-f]{32,}", "", name)
    return name[:NAME_LENGTH]


def lines(steps: Sequence[Sequence[Kernel]], named: Callable[[Sequence[Kernel]], Sequence[str | None]]) -> list[Line]:
    """Costs of the steps' launches, the most expensive first; ``named`` names those of a step, ``None`` for what to
    leave out."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for step in steps:
        end = step[0].begin
        for kernel, name in zip(step, named(step), strict=True):
            if name is not None:
                found[name].append((kernel.us, max(0.0, kernel.end - end), max(0.0, kernel.begin - end)))
            end = max(end, kernel.end)
    summed = [
        Line(name, len(launches) // len(steps), *map(statistics.mean, zip(*launches, strict=True)))
        for name, launches in found.items()
    ]
    return sorted(summed, key=lambda line: -line.adds * line.count)


def by_kernel(step: Sequence[Kernel]) -> list[str | None]:
    return [short(kernel.name) for kernel in step]


@dataclass(frozen=True)
class Gemms:
    """The GEMMs that a step launches, in their order: the name of each, and the weights that it reads, in bytes.

    drafted: whether GEMMs of a draft may follow in the same graph, as those that make the context of DSpark's stages.
    """

    names: Sequence[str]
    weights: Mapping[str, float]
    drafted: bool = False

    @classmethod
    def of(cls, config: ModelConfig, ranks: int, tokens: int, *, drafted: bool = False) -> Gemms:
        """Those of a step of so many tokens, with the mean of the experts that random ones visit."""
        products = launched_gemms(config, Ownership(size=ranks))
        read = {each.name: weights(each, tokens) for each in products}
        return cls([product.name for product in products], read, drafted)

    def __call__(self, step: Sequence[Kernel]) -> list[str | None]:
        """The GEMM of each launch, ``None`` for others.

        Raises:
            ValueError: a step does not launch as many.
        """
        count = sum(GEMM in kernel.name for kernel in step)
        if count < len(self.names) or (count > len(self.names) and not self.drafted):
            raise ValueError(f"a step launches {count} kernels named {GEMM}, expected {len(self.names)}")
        names = iter(self.names)
        return [next(names, DRAFT) if GEMM in kernel.name else None for kernel in step]


def weights(product: GemmSpec, tokens: int) -> float:
    """Bytes of codes and block scales that ``tokens`` read of a GEMM."""
    read: float = product.groups
    if product.experts_per_token:
        # The shared expert is always read.
        routed, visits = product.groups - product.shared, product.experts_per_token - product.shared
        read = product.shared + routed * (1 - (1 - visits / routed) ** tokens)
    return read * product.features * product.k * (2 if product.gated else 1) * BYTES_PER_WEIGHT


def between(kernels: Sequence[Kernel], steps: Sequence[Sequence[Kernel]]) -> list[list[Kernel]]:
    """Launches from each step to the next, the last launch of the one and the first of the other included."""
    return [
        [step[-1], *(kernel for kernel in kernels if step[-1].begin < kernel.begin < later[0].begin), later[0]]
        for step, later in pairwise(steps)
    ]


def _inside(step: Sequence[Kernel]) -> list[str | None]:
    """Names of what is between steps: the first launch is the step's before, the last one the next step's."""
    return [None, *(short(kernel.name) for kernel in step[1:-1]), "(the next step's first launch)"]


def text(path: Path, gemms: Gemms | None = None, *, drafted: bool = False) -> str:
    """The tables of a trace's decode steps: of all kernels, and of ``gemms`` beside their floors.

    drafted: whether the steps are verify passes, between which a draft runs: then of that, too.
    """
    kernels = read(path)
    steps = graphs(kernels)
    spans = [step[-1].end - step[0].begin for step in steps]
    begins = [step[0].begin for step in steps]
    apart = [later - earlier for earlier, later in pairwise(begins)]
    head = f"{len(steps)} graphs of {len(steps[0])} launches, {statistics.median(spans):.0f} us from begin to end" + (
        f", {statistics.median(apart):.0f} us from one to the next" if apart else ""
    )
    heads = f"{'step, us':>9} {'count':>6} {'adds':>8} {'gap':>6} {'takes':>8}"
    table = [head, f"{heads}  kernel", *(f"{_row(line)}  {line.name}" for line in lines(steps, by_kernel))]
    if gemms is not None:
        table += ["", f"{heads} {'floor':>7} {'of adds':>7}  GEMM, floor at {COPY_BYTES_PER_US / 1e6:.2f} TB/s"]
        for line in lines(steps, gemms):
            floor = gemms.weights.get(line.name, 0.0) / COPY_BYTES_PER_US
            known = f"{floor:7.2f} {floor / line.adds:7.0%}" if floor else f"{'':7} {'':7}"
            table.append(f"{_row(line)} {known}  {line.name}")
    if drafted and apart:
        rest = between(kernels, steps)
        found = lines(rest, _inside)
        span = statistics.mean(part[-1].begin - part[0].end for part in rest)
        idle = sum(line.gap * line.count for line in found)
        launches = len({kernel.graph for part in rest for kernel in part[1:-1]}) / len(rest)
        table += [
            "",
            f"between verify passes: {launches:.0f} launches by the host, {span:.0f} us, {idle:.0f} of them idle",
        ]
        table += [f"{heads}  kernel", *(f"{_row(line)}  {line.name}" for line in found)]
    return "\n".join(table)


def _row(line: Line) -> str:
    return f"{line.count * line.adds:9.1f} {line.count:6} {line.adds:8.2f} {line.gap:6.2f} {line.us:8.2f}"
