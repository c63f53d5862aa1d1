"""Times of the Triton kernels on a CUDA GPU, beside their floors and their peers, in one run.

Every case is captured in a CUDA graph of several runs and replayed; the median replay counts. Inputs stay the same, so
what fits L2 is read from there: floors, which are bytes over the measured copy bandwidth, bind only cases well past
the cache. ``over empty`` is the time beyond that of an empty kernel in such a graph.
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
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RUNS, REPLAYS = 20, 15
COPY_BYTES = 2**30


def _import_paths() -> None:
    """Let ``nvfp4_sgl.triton_kernels`` be found in a checkout that is not installed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
    import nvfp4_sgl

    if importlib.util.find_spec("nvfp4_sgl.triton_kernels") is None:
        spec = importlib.util.spec_from_file_location(
            "nvfp4_sgl.triton_kernels",
            ROOT / "triton_kernels" / "__init__.py",
            submodule_search_locations=[str(ROOT / "triton_kernels")],
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        nvfp4_sgl.triton_kernels = module
        spec.loader.exec_module(module)


def microseconds(run: Callable[[], object]) -> float:
    """Median time of one run inside a graph of ``RUNS``."""
    torch.cuda.synchronize()  # the case's tensors are still being filled
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(RUNS):
            run()
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / RUNS)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes a second of a copy by a kernel, read and written (a graph's own copies take the slower copy engines)."""
    source = torch.empty(COPY_BYTES // 4, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (microseconds(lambda: torch.mul(source, 1.0, out=target)) * 1e-6)


def families(names: list[str]) -> Iterator[tuple[str, Any]]:
    import bench

    known = sorted(module.name for module in pkgutil.iter_modules(bench.__path__))
    for name in names or known:
        if name not in known:
            raise SystemExit(f"bench_kernels: family {name!r}: expected one of {', '.join(known)}")
        yield name, importlib.import_module(f"bench.{name}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_kernels")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels: no CUDA device; it measures, and measures nothing without one")
    _import_paths()
    bandwidth, empty = copy_bandwidth(), microseconds(lambda: torch.cuda._sleep(0))
    chip, date = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    print(f"{chip}, torch {torch.__version__}, {date}: copy {bandwidth / 1e12:.2f} TB/s, empty kernel {empty:.2f} us")
    print("| case | us | floor us | of floor | over empty us | peers us (theirs / ours) |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows, failed = [], 0
    for family, module in families(arguments.families):
        for case in module.cases():
            if arguments.only not in case.name:
                continue
            try:
                time = microseconds(case.run)
                peers = {name: microseconds(run) for name, run in case.peers.items()}
            except Exception as error:
                failed += 1
                print(f"| {case.name} | failed: {type(error).__name__}: {str(error).splitlines()[0][:120]} | | | | |")
                continue
            floor = case.bytes / bandwidth * 1e6
            beside = ", ".join(f"{name} {peer:.1f} ({peer / time:.2f}x)" for name, peer in peers.items())
            print(
                f"| {case.name} | {time:.1f} | {floor:.1f} | {floor / time:.0%} | {time - empty:.1f} | {beside} |",
                flush=True,
            )
            rows.append({"family": family, "case": case.name, "us": time, "floor_us": floor, "peers_us": peers})
    if arguments.json:
        report = {"chip": chip, "date": date, "copy_bytes_per_second": bandwidth, "empty_us": empty, "cases": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
