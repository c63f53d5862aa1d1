"""Time and memory of converting, verifying and loading, on random tensors of Flash's shapes.

Tensors are random bytes in DeepSeek's storages (``--load-format dummy``'s), written to ``DIR/source`` once. The
processes' memory is read from /proc while they run: what they allocated, and with it the pages of files that they map,
which the system may take back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch

from benchmarks import own_folder
from benchmarks.process_memory import measured
from benchmarks.random_checkpoint import write_random
from nvfp4_sgl.synthetic.tiny_config import TinyFormat

LOADED_TP_SIZE = 8
"""Tensor-parallel size whose rank 0 is loaded: a share of 20 GB fits beside other work in 24 GB of memory."""


def main() -> int:
    """Write the source if it is not there; convert it, check the result, load it; print a table."""
    parser = argparse.ArgumentParser(
        prog="launch/bench_convert", description="Measure nvfp4-sgl convert on tensors of Flash's shapes."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; two layers are 9.25 GB")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers (default: %(default)s)")
    parser.epilog = "What follows -- goes to nvfp4-sgl convert."
    given = [*sys.argv[1:], "--"]
    end = given.index("--")
    args, flags = parser.parse_args(given[:end]), given[end + 1 : -1]
    source, target = args.directory / "source", args.directory / "result"
    own_folder.claim(source)
    own_folder.claim(target)
    if not (source / "config.json").exists():
        write_random(source, TinyFormat.DEEPSEEK, args.layers)
    shutil.rmtree(target, ignore_errors=True)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB in {args.layers} layers, {os.cpu_count()} cores", flush=True)
    print("command                         seconds   GB/s   allocated GB   with mapped files GB")
    cli = "nvfp4_sgl.cli"
    for name, command in (
        ("convert", [cli, "convert", str(source), str(target), *flags]),
        ("inspect", [cli, "inspect", str(target)]),
        ("inspect --values", [cli, "inspect", str(target), "--values"]),
        ("inspect --checksums", [cli, "inspect", str(target), "--checksums"]),
        ("verify --against", [cli, "verify", str(target), "--against", str(source)]),
        (f"load rank 0 of {LOADED_TP_SIZE}", ["benchmarks.load_rank", str(target), str(LOADED_TP_SIZE)]),
    ):
        (peak,) = measured({args.directory / f"{name.replace(' ', '_')}.log": command})
        rate, own, resident = size / 1e9 / peak.seconds, peak.own / 1e9, peak.resident / 1e9
        print(f"{name:<30}{peak.seconds:>9.1f}{rate:>7.2f}{own:>15.2f}{resident:>23.2f}", flush=True)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(os.cpu_count() or 1)
    sys.exit(main())
