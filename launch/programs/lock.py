"""Pins the closure of pyproject.toml's dependencies in constraints.txt: behind launch/lock, whose head says how."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "constraints.txt"
HEADER = """\
# Every distribution of the environment, pinned: Linux x86_64, CPython 3.11 and 3.12.
# Written by launch/lock from pyproject.toml; launch/environment installs exactly this.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/lock", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="moved to its newest version")
    packages: list[str] = parser.parse_args().packages
    uv = shutil.which("uv")
    if uv is None:
        parser.error("uv not found on the path; expected the one of launch/environment, or `pip install uv`")
    command = [uv, "pip", "compile", "pyproject.toml", "--extra", "dev", "--extra", "docs"]
    command += ["--universal", "--python-version", "3.11"]
    command += ["--no-annotate", "--no-header", "--quiet", "--output-file", str(TARGET)]
    for name in packages:
        command += ["--upgrade-package", name]
    previous = TARGET.read_text() if TARGET.exists() else None
    try:
        subprocess.run(command, cwd=ROOT, check=True)
        pins = [line.partition(";") for line in TARGET.read_text().splitlines() if line and line[0] != "#"]
    except BaseException:
        if previous is not None:
            TARGET.write_text(previous)
        raise
    # A constraint's marker only matters where one name has several versions.
    names = [pin.partition("==")[0].strip() for pin, _, _ in pins]
    lines = [
        pin.strip() if names.count(name) == 1 else f"{pin.strip()} ; {marker.strip()}"
        for name, (pin, _, marker) in zip(names, pins, strict=True)
    ]
    TARGET.write_text(HEADER + "".join(f"{line}\n" for line in sorted(lines, key=str.lower)))
    print(f"{TARGET.name}: {len(lines)} distributions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
