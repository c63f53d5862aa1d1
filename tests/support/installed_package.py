"""A package that is installed for one test: files on the path, and an entry point."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_package(site: Path, name: str, files: Mapping[str, str], group: str, points: Mapping[str, str]) -> None:
    """Write ``files``, by their path in ``site``, and the metadata of a distribution with ``points`` of ``group``."""
    information = site / f"{name}-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (information / "entry_points.txt").write_text("\n".join(lines))
    for path, text in files.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_text(text)
