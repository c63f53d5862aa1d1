"""The benchmark behind launch/bench_load: loading NVFP4 tensors of Flash's shapes by ranks on GPUs, from a warm cache.

The checkpoint is written by all cores, and read once, so that its files lie in the page cache. Each rank then loads its
share into Hopper's layout, all at a time, each on a GPU of its own as far as there are as many. What counts are the
bytes of the files that a rank takes a second, and what the process allocates of the host's memory: beside that, the
pages of files are the system's. Pinned memory is added, since the system may count it elsewhere. Imports are not
counted. A table and the verdicts come last; exit status 1 if a goal was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import own_folder
from benchmarks.process_memory import Peak, measured
from benchmarks.random_checkpoint import write_random
from nvfp4_sgl.synthetic.tiny_config import TinyFormat

LEAST_RATE = 2e9
"""Bytes a second and rank."""
MOST_ALLOCATED = 1.2
"""Times the largest file."""
BYTES = 1e9
PIECE_BYTES = 64 << 20
"""A thread reads this much at a time to warm the page cache."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="where the checkpoint is written, or was with --keep"
    )
    parser.add_argument("--layers", type=int, default=6, help="the first layers of Flash (default: 6, which are 24 GB)")
    parser.add_argument(
        "--tp", type=int, nargs="+", default=[1], metavar="N", help="ranks; one measurement each (default: 1)"
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu (default: cuda)")
    parser.add_argument("--keep", action="store_true", help="do not remove the checkpoint at the end")
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        visible_gpus()  # before anything is written
    source = arguments.directory / "source"
    own_folder.claim(source)
    try:
        if not (source / "config.json").exists():
            begun = time.monotonic()
            shutil.rmtree(source, ignore_errors=True)  # a run that was cut off
            write_random(source, TinyFormat.NVFP4_FULL, arguments.layers)
            print(f"written in {time.monotonic() - begun:.1f} s", flush=True)
        warm(source)
        runs = [measure(source, ranks, arguments) for ranks in arguments.tp]
    finally:
        if not arguments.keep:
            own_folder.remove(source)
    print("\n".join(table(runs)))
    verdicts = [verdict(run) for run in runs]
    for _, words in verdicts:
        print(words, flush=True)
    return 0 if all(good for good, _ in verdicts) else 1


@dataclass(frozen=True)
class Run:
    """The reports of a measurement's ranks, and their memory.

    Attributes:
        sizes: of the checkpoint's files. gpus: that the ranks shared; 0 on the CPU.
    """

    sizes: Sequence[int]
    gpus: int
    said: Sequence[dict[str, Any]]
    peaks: Sequence[Peak]

    @property
    def rates(self) -> list[float]:
        """Bytes a second of each rank."""
        return [found["bytes"] / found["seconds"] for found in self.said]

    @property
    def allocated(self) -> list[int]:
        """Bytes of host memory that each rank allocates; all that is resident where the system names no own ones."""
        return [
            (peak.own or peak.resident) + found["pinned"] for peak, found in zip(self.peaks, self.said, strict=True)
        ]

    @property
    def most_allocated(self) -> float:
        """Most bytes that a rank may allocate."""
        return MOST_ALLOCATED * max(self.sizes)


def warm(source: Path) -> None:
    """Read the files once, so that all of them are in the page cache; says how fast that is."""
    pieces = [
        (file, start) for file in source.glob("*.safetensors") for start in range(0, file.stat().st_size, PIECE_BYTES)
    ]

    def read(piece: tuple[Path, int]) -> int:
        with piece[0].open("rb", buffering=0) as stream:
            stream.seek(piece[1])
            return len(stream.read(PIECE_BYTES))

    threads, begun = len(os.sched_getaffinity(0)), time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        nbytes = sum(pool.map(read, pieces))
    rate = nbytes / (time.monotonic() - begun) / BYTES
    print(f"read once, {nbytes / BYTES:.1f} GB: {rate:.2f} GB/s by {threads} threads", flush=True)


def measure(source: Path, ranks: int, arguments: argparse.Namespace) -> Run:
    """Load all of ``ranks`` at once."""
    gpus = visible_gpus() if arguments.device != "cpu" else []
    commands, environments = {}, []
    for rank in range(ranks):
        log = arguments.directory / f"rank_{rank}_of_{ranks}.log"
        commands[log] = ["benchmarks.load_rank", str(source), str(ranks), "--rank", str(rank)]
        commands[log] += ["--device", arguments.device]
        environments.append({"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]} if gpus else {})
    peaks = measured(commands, environments)
    said = [json.loads(log.read_text().splitlines()[-1]) for log in commands]
    for rank, (peak, found) in enumerate(zip(peaks, said, strict=True)):
        line = {"ranks": ranks, "rank": rank, **found, "allocated": peak.own, "resident": peak.resident}
        print(json.dumps(line), flush=True)
    sizes = [file.stat().st_size for file in source.glob("*.safetensors")]
    return Run(sizes, min(len(gpus), ranks), said, peaks)


def visible_gpus() -> list[str]:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        SystemExit: there are none.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    count = torch.cuda.device_count()
    if not count:
        raise SystemExit("launch/bench_load: expected a GPU, found none; --device cpu runs without")
    return [str(number) for number in range(count)]


def table(runs: Sequence[Run]) -> list[str]:
    """Lines of a table in Markdown, a row a rank."""
    lines = [
        "| device | ranks | GPUs | rank | GB taken | seconds | waiting for files | GB/s | allocated, GB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in runs:
        for rank, (found, rate, allocated) in enumerate(zip(run.said, run.rates, run.allocated, strict=True)):
            lines.append(
                f"| {found['device']} | {len(run.said)} | {run.gpus} | {rank} | {found['bytes'] / BYTES:.2f} |"
                f" {found['seconds']:.2f} | {found['waited for files']:.2f} | {rate / BYTES:.2f} |"
                f" {allocated / BYTES:.2f} |"
            )
    return lines


def verdict(run: Run) -> tuple[bool, str]:
    """Whether the goals are met, and a line that says so: of the slowest rank and of the one that allocates most."""
    rate, most = min(run.rates), max(run.allocated)
    before = max(found["allocated before"] for found in run.said)
    good = rate >= LEAST_RATE and most <= run.most_allocated
    words = (
        f"{'pass' if good else 'FAIL'}: {sum(run.sizes) / BYTES:.1f} GB, {len(run.said)} rank(s):"
        f" {rate / BYTES:.2f} GB/s a rank (goal {LEAST_RATE / BYTES:.0f}), {most / BYTES:.2f} GB allocated,"
        f" {before / BYTES:.2f} of it before loading (goal at most {run.most_allocated / BYTES:.2f}: {MOST_ALLOCATED} x"
        " the largest file)"
    )
    return good, words


if __name__ == "__main__":
    sys.exit(main())
