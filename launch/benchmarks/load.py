"""The benchmark behind launch/bench_load: loading NVFP4 tensors of Flash's shapes by ranks on GPUs, from a warm cache.

The checkpoint is written at once by all cores, so that its files lie in the page cache. Each rank then loads its share
into Hopper's layout, all at a time and each on a GPU of its own. What counts are the stored bytes of a rank's share a
second, and what the process allocates of the host's memory: beside that, the pages of the mapped files are the
system's. Imports are not counted. The last line is the verdict; exit status 1 if a goal was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.process_memory import Peak, measured
from benchmarks.random_checkpoint import write_random
from nvfp4_sgl.checkpoint.tiny_config import TinyFormat

LEAST_RATE = 2e9
"""Bytes a second and rank."""
MOST_ALLOCATED = 1.2
"""Times the largest file."""
BYTES = 1e9


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the checkpoint is written, or was with --keep")
    parser.add_argument("--layers", type=int, default=6, help="of Flash's; 24 GB by default")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="a measurement for each (default: 1)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu (default: cuda)")
    parser.add_argument("--keep", action="store_true", help="do not remove the checkpoint at the end")
    arguments = parser.parse_args()
    source = arguments.directory / "source"
    try:
        if not (source / "config.json").exists():
            begun = time.monotonic()
            shutil.rmtree(source, ignore_errors=True)
            write_random(source, TinyFormat.NVFP4_FULL, arguments.layers)
            print(f"written in {time.monotonic() - begun:.1f} s", flush=True)
        verdicts = [measure(source, ranks, arguments) for ranks in arguments.ranks]
    finally:
        if not arguments.keep:
            shutil.rmtree(source, ignore_errors=True)
    for _, words in verdicts:
        print(words, flush=True)
    return 0 if all(good for good, _ in verdicts) else 1


def measure(source: Path, ranks: int, arguments: argparse.Namespace) -> tuple[bool, str]:
    """Load all of ``ranks`` at once; whether that met the goals, and a line that says so."""
    sizes = [file.stat().st_size for file in source.glob("*.safetensors")]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if os.environ.get("CUDA_VISIBLE_DEVICES") else []
    commands, environments = {}, []
    for rank in range(ranks):
        log = arguments.directory / f"rank_{rank}_of_{ranks}.log"
        commands[log] = ["benchmarks.load_rank", str(source), str(ranks), "--rank", str(rank)]
        commands[log] += ["--device", arguments.device]
        environments.append({"CUDA_VISIBLE_DEVICES": gpus[rank] if gpus else str(rank)})
    peaks = measured(commands, environments)
    said = [json.loads(log.read_text().splitlines()[-1]) for log in commands]
    for rank, (peak, found) in enumerate(zip(peaks, said, strict=True)):
        print(json.dumps({"ranks": ranks, "rank": rank, **found, "allocated": peak.own, "resident": peak.resident}))
    return verdict(ranks, sizes, said, peaks)


def verdict(ranks: int, sizes: list[int], said: list[dict[str, Any]], peaks: list[Peak]) -> tuple[bool, str]:
    """The figures of the slowest rank and of the one that allocates most, beside the goals."""
    rates = [min(found["weights"], sum(sizes)) / found["seconds"] for found in said]
    rate, most, file = min(rates), max(peak.own for peak in peaks), max(sizes)
    before = max(found["allocated before"] for found in said)
    good = rate >= LEAST_RATE and most <= MOST_ALLOCATED * file
    words = (
        f"{'pass' if good else 'FAIL'}: {sum(sizes) / BYTES:.1f} GB, {ranks} rank(s): {rate / BYTES:.2f} GB/s a rank"
        f" (goal {LEAST_RATE / BYTES:.0f}), {most / BYTES:.2f} GB allocated, {before / BYTES:.2f} of it before loading"
        f" (goal at most {MOST_ALLOCATED * file / BYTES:.2f}: {MOST_ALLOCATED} x the largest file)"
    )
    return good, words


if __name__ == "__main__":
    sys.exit(main())
