"""Run the cases on this machine's GPU and in the emulator, and compare: ``launch/check_sm90``."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import multiprocessing
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from tests.sm100.hardware.catalogue import catalogue
from tests.sm100.hardware.record import RECORD, Recording, digest, ulp_distance
from tests.sm100.hardware.runners import compile_case, emulate, run_on_gpu

WORKERS = 8
SECONDS = 60
"""Seconds for a case. A process that dies without a word is noticed by this, too."""
Results = dict[str, bytes]
Outcome = Results | str
"""Results, or what went wrong."""


def machine() -> dict[str, str]:
    """What the results are computed on and with."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "compute capability": f"{major}.{minor}",
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def emulate_by_name(name: str) -> Outcome:
    """A case in the emulator."""
    try:
        case = catalogue()[name]
        return emulate(case, compile_case(case))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_by_name(name: str) -> Outcome:
    """A case on the GPU."""
    try:
        return run_on_gpu(catalogue()[name])
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def on_gpu(names: list[str]) -> dict[str, Outcome]:
    """Every case on the GPU, one after the other; a failure, which may spoil the context, ends its process."""
    found: dict[str, Outcome] = {}
    left = list(names)
    while left:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            while left:
                name = left.pop(0)
                try:
                    found[name] = pool.apply_async(run_by_name, (name,)).get(SECONDS)
                except multiprocessing.TimeoutError:
                    found[name] = f"no end within {SECONDS} s"
                if isinstance(found[name], str):
                    break
    return found


def in_emulator(names: list[str]) -> dict[str, Outcome]:
    """Every case in the emulator, in processes of their own: it stands in for CuTeDSL's runtime library."""
    with multiprocessing.get_context("spawn").Pool(min(WORKERS, os.cpu_count() or 1)) as pool:
        pending = {name: pool.apply_async(emulate_by_name, (name,)) for name in names}
        found: dict[str, Outcome] = {}
        for name, outcome in pending.items():
            try:
                found[name] = outcome.get(SECONDS)
            except multiprocessing.TimeoutError:
                found[name] = f"no end within {SECONDS} s"
        return found


def verdict(name: str, result: bytes, other: bytes | None, ulp: Mapping[str, int]) -> str:
    """ "equal", "N ulp" where that is allowed, or what is wrong."""
    if other is None:
        return "missing"
    if name not in ulp:
        if digest(result) == digest(other):
            return "equal"
        differing = np.frombuffer(result, np.uint8) != np.frombuffer(other, np.uint8)
        return f"DIFFERS in {int(differing.sum())} of {len(result)} B"
    distance = ulp_distance(result, other)
    return f"{distance} ulp" if distance <= ulp[name] else f"DIFFERS by {distance} ulp"


def compare_case(
    name: str, gpu: Outcome, emulator: Outcome | None, recorded: Recording | None
) -> tuple[bool, list[str]]:
    """Whether a case agrees, and a line for each thing to say of it."""
    for where, outcome in (("on the GPU", gpu), ("in the emulator", emulator)):
        if isinstance(outcome, str):
            return False, [f"{name}: FAILED {where}: {outcome[:400]}"]
    assert not isinstance(gpu, str) and not isinstance(emulator, str)
    ulp = catalogue()[name].ulp
    right, lines = True, []
    for label, result in gpu.items():
        short = label.removeprefix(f"{name}/")
        if emulator is not None:
            found = verdict(label, result, emulator.get(label), ulp)
            right &= found != "missing" and not found.startswith("DIFFERS")
            if found != "equal":
                lines.append(f"    {short}: {found} from the emulator's")
        if recorded is not None and label not in recorded.digests.keys() | recorded.values.keys():
            lines.append(f"    {short}: not recorded yet")
        elif recorded is not None and not recorded.agrees(label, result, 0 if label in ulp else None):
            lines.append(f"    {short}: not what is recorded")
            right = False
    return right, [f"{name}: {len(gpu)} results" + ("" if lines else ", all equal"), *lines]


def compare(gpu: dict[str, Outcome], emulator: dict[str, Outcome] | None, recorded: Recording | None) -> bool:
    """Print a table; whether everything agrees."""
    every = True
    for name, outcome in gpu.items():
        right, lines = compare_case(name, outcome, emulator[name] if emulator is not None else None, recorded)
        print(*lines, sep="\n")
        every &= right
    return every


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="launch/check_sm90", description=__doc__)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--record", action="store_true", help="write recorded.json instead of comparing with it")
    parser.add_argument("--save", type=Path, help="a .zip for all bytes that the GPU gave")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("no Hopper GPU (compute capability 9.0) here")
        return 2
    names = [name for name in catalogue() if options.only in name]
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    gpu = on_gpu(names)
    exact = {
        label: result for results in gpu.values() if isinstance(results, dict) for label, result in results.items()
    }
    if options.save:
        with zipfile.ZipFile(options.save, "w", zipfile.ZIP_DEFLATED) as archive:
            for label, result in exact.items():
                archive.writestr(f"{label}.bin", result)
    if options.record:
        approximate = {label for name in names for label in catalogue()[name].ulp}
        Recording.of(machine(), exact, approximate).save()
    recorded = Recording.load() if RECORD.exists() and not options.record else None
    emulator = in_emulator(names) if shutil.which("gcc") else None
    if emulator is None:
        print("no gcc here: compared with the recording only")
    right = compare(gpu, emulator, recorded)
    print("all agree" if right else "NOT all agree")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
