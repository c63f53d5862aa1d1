"""Time and memory of converting, verifying and loading, on random tensors of Flash's shapes.

Tensors are random bytes in DeepSeek's storages (``--load-format dummy``'s), written to ``DIR/source`` once. The
processes' memory is read from /proc while they run: what they allocated, and with it the pages of files that they map,
which the system may take back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.flash import write_flash
from nvfp4_sgl.checkpoint.tiny_config import TinyFormat
from nvfp4_sgl.checkpoint.verified import verify_dummy

SHARD_BYTES = 5 * 10**9
LOADED_TP_SIZE = 8
"""Tensor-parallel size whose rank 0 is loaded: a share of 20 GB fits beside other work in 24 GB of memory."""
SECONDS = 0.05
"""Between two looks at a process's memory."""


def main() -> int:
    """Write the source if it is not there; convert it, check the result, load it; print a table."""
    parser = argparse.ArgumentParser(description="Measure nvfp4-sgl convert on tensors of Flash's shapes.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write, 20 GB by default")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers (default: %(default)s)")
    parser.epilog = "What follows -- goes to nvfp4-sgl convert."
    given = [*sys.argv[1:], "--"]
    end = given.index("--")
    args, flags = parser.parse_args(given[:end]), given[end + 1 : -1]
    source, target = args.directory / "source", args.directory / "result"
    if not (source / "config.json").exists():
        write_source(source, args.layers)
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
        seconds, own, resident = measured(command, args.directory / f"{name.replace(' ', '_')}.log")
        print(
            f"{name:<30}{seconds:>9.1f}{size / 1e9 / seconds:>7.2f}{own / 1e9:>15.2f}{resident / 1e9:>23.2f}",
            flush=True,
        )
    return 0


def write_source(directory: Path, layers: int) -> None:
    """A checkpoint with the config.json of a cut Flash."""
    directory.mkdir(parents=True, exist_ok=True)
    written = write_flash(directory, TinyFormat.DEEPSEEK, layers)
    verified = verify_dummy(written)
    reader, part, filled, count = verified.reader(), {}, 0, 0
    for name, entry in verified.inventory.entries.items():
        part[name] = reader.read(name).clone()
        filled += entry.nbytes
        if filled > SHARD_BYTES:
            save_file(part, directory / f"part-{count:03d}.safetensors")
            part, filled, count = {}, 0, count + 1
    save_file(part, directory / f"part-{count:03d}.safetensors")


def measured(command: list[str], log: Path) -> tuple[float, int, int]:
    """Seconds, peak bytes allocated, and peak bytes with mapped files, of ``python -m COMMAND``."""
    started, own, resident = time.monotonic(), 0, 0
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", *command], stdout=out, stderr=out)
        while process.poll() is None:
            status = memory(process.pid)
            own, resident = max(own, status.get("RssAnon", 0)), max(resident, status.get("VmRSS", 0))
            time.sleep(SECONDS)
    if process.returncode:
        raise SystemExit(f"python -m {' '.join(command)} ended with {process.returncode}: see {log}")
    return time.monotonic() - started, own, resident


def memory(pid: int) -> dict[str, int]:
    """Sizes in /proc/PID/status, in bytes; empty once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(value) * 1024 for name, value, _ in fields}


if __name__ == "__main__":
    torch.set_num_threads(os.cpu_count() or 1)
    sys.exit(main())
