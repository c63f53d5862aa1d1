"""Times of the Triton kernels on a CUDA GPU, beside their floors and their peers, in one run.

Every case is captured in a CUDA graph of several runs and replayed; the median replay counts. Floors are the larger of
bytes over the measured copy bandwidth and operations over the measured rate of bf16 GEMMs. Inputs stay the same, so
what fits L2 is read from there: floors by bytes bind only cases well past the cache. ``over empty`` is the time beyond
that of an empty kernel in such a graph. A peer whose results are not ours is named as such and not timed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import pkgutil
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel_report import HEADER, Chip, measure, summary

ROOT = Path(__file__).resolve().parents[2]
RUNS, REPLAYS = 20, 15
GRAPH_US = 20_000
"""Runs longer than a ``RUNS``-th of it share a graph with fewer."""
COPY_BYTES = 2**30
PRODUCT_SIZE = 8192


def elapsed(work: Callable[[], object]) -> float:
    """Microseconds between events around ``work``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000


def microseconds(run: Callable[[], object]) -> float:
    """Median time of one run inside a graph of several."""
    torch.cuda.synchronize()  # the case's tensors are still being filled
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        first = elapsed(run)
    torch.cuda.synchronize()
    runs = min(max(int(GRAPH_US / first), 1), RUNS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(runs):
            run()
    times = [elapsed(graph.replay) / runs for _ in range(REPLAYS + 2)]
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes a second of a copy by a kernel, read and written (a graph's own copies take the slower copy engines)."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (microseconds(lambda: torch.mul(source, 1.0, out=target)) * 1e-6)


def matrix_rate() -> float:
    """Operations a second of a large bf16 GEMM of random matrices (constant ones draw less power, so run faster)."""
    a, b = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE, device="cuda", dtype=torch.bfloat16).unbind()
    out = torch.empty_like(a)
    return 2 * PRODUCT_SIZE**3 / (microseconds(lambda: torch.mm(a, b, out=out)) * 1e-6)


def measured_chip() -> Chip:
    return Chip(
        name=torch.cuda.get_device_name(),
        bandwidth=copy_bandwidth(),
        rate=matrix_rate(),
        empty_us=microseconds(lambda: torch.cuda._sleep(0)),
    )


def families(names: list[str]) -> Iterator[tuple[str, Any]]:
    from benchmarks import families

    known = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    for name in names or known:
        if name not in known:
            raise SystemExit(f"bench_kernels: family {name!r}: expected one of {', '.join(known)}")
        yield name, importlib.import_module(f"benchmarks.families.{name}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_kernels")
    parser.add_argument("families", nargs="*", help="modules of launch/benchmarks/families (default: all)")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure only cases whose names contain it")
    parser.add_argument("--without", metavar="TEXT", help="leave out peers whose names contain it, such as nvcc")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the times here, as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels: no CUDA device; it measures, and measures nothing without one")
    sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
    chip, date = measured_chip(), datetime.date.today().isoformat()
    print(
        f"{chip.name}, torch {torch.__version__}, {date}: copy {chip.bandwidth / 1e12:.2f} TB/s,"
        f" bf16 products {chip.rate / 1e12:.0f} TFLOP/s, empty kernel {chip.empty_us:.2f} us"
    )
    print(HEADER)
    rows = []
    for family, module in families(arguments.families):
        for case in module.cases():
            if arguments.only in case.name:
                rows.append(measure(family, case, chip, microseconds, without=arguments.without))
                print(rows[-1].line(chip.empty_us), flush=True)
    print("\n" + "\n".join(summary(rows)))
    if arguments.output:
        report = {
            "chip": asdict(chip),
            "torch": torch.__version__,
            "date": date,
            "cases": [row.as_json() for row in rows],
        }
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row.us is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
