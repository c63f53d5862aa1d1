"""Files for somebody who has no such GPU: versions, the driver's word on the hardware, logs, the failing code."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from first_light.journal import code_folder
from first_light.outcome import ROOT, Outcome

FOLDER = ROOT / "build" / "first_light"
TOLD = ("torch", "triton", "nvidia", "cuda", "sglang", "flashinfer", "numpy", "transformers", "nvfp4", "tvm", "cutlass")
"""Beginnings of the names of distributions whose versions are told."""
MAX_CODE_BYTES = 64 * 2**20
"""The most of Triton's cache that goes along."""
QUERY_SECONDS = 60
DOCTOR = "import sys; from nvfp4_sgl.cli import main; sys.exit(main(['doctor', '--json']))"
TRITON_CACHE = "triton_cache"


def new_folder(parent: Path | None = None) -> Path:
    """An empty folder for a run, named after the time."""
    base = (parent or FOLDER) / time.strftime("%Y%m%d_%H%M%S")
    folder, count = base, 1
    while folder.exists():
        folder, count = base.with_name(f"{base.name}_{count}"), count + 1
    folder.mkdir(parents=True)
    return folder.resolve()


def describe_machine(folder: Path) -> None:
    """Write ``machine.json`` and what commands say of the GPU; whatever cannot be had is left out."""
    versions = {found.metadata["Name"]: found.version for found in distributions()}
    told: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "python": sys.version,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip(),
        "changed files": _output("git", "-C", str(ROOT), "status", "--short").splitlines(),
        "versions": {name: versions[name] for name in sorted(versions) if name and name.lower().startswith(TOLD)},
    }
    (folder / "machine.json").write_text(json.dumps(told, indent=1) + "\n")
    for name, command in {
        "nvidia_smi.txt": ("nvidia-smi",),
        "nvidia_smi_q.txt": ("nvidia-smi", "-q"),
        "nvidia_smi_topology.txt": ("nvidia-smi", "topo", "-m"),
        "driver.txt": ("cat", "/proc/driver/nvidia/version"),
        "doctor.json": (sys.executable, "-c", DOCTOR),
    }.items():
        text = _output(*command)
        if text:
            (folder / name).write_text(text)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def keep_suspects(outcome: Outcome, cache: Path) -> None:
    """Keep the code that a failed step ended at: CuTeDSL's of that kernel, and what Triton has compiled since."""
    kept = {code_folder(outcome.folder, name) for name in (outcome.account.kernel, outcome.item) if name}
    for folder in (outcome.folder / "code").glob("*"):
        if outcome.passed or folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)
    if outcome.passed or not cache.exists():
        return
    room = MAX_CODE_BYTES
    for file in sorted(path for path in cache.rglob("*") if path.suffix in (".ptx", ".cubin", ".json")):
        size = file.stat().st_size
        if file.stat().st_mtime >= outcome.account.since and size <= room:
            target = outcome.folder / "triton" / file.relative_to(cache)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
            room -= size


def pack(folder: Path) -> Path:
    """The folder as one file beside it."""
    path = folder.with_suffix(".tar.gz")
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, arcname=f"first_light_{folder.name}")
    return path
