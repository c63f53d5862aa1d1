"""Folders that a benchmark makes and removes: only what it has made itself."""

from __future__ import annotations

import shutil
from pathlib import Path


def _mark(folder: Path) -> Path:
    """A file beside ``folder`` that says that a benchmark has made it."""
    return folder.with_name(f".{folder.name}.made_by_benchmark")


def claim(folder: Path) -> None:
    """Note that ``folder`` is a benchmark's, before anything is written to it.

    Raises:
        SystemExit: it is there and holds what no benchmark has made.
    """
    if folder.exists() and not _mark(folder).exists() and any(folder.iterdir()):
        raise SystemExit(
            f"{folder}: expected no such folder, or one made here; it holds other files: name another place"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _mark(folder).touch()


def remove(folder: Path) -> None:
    """Remove a claimed folder, if it is there; leave any other alone."""
    if _mark(folder).exists():
        shutil.rmtree(folder, ignore_errors=True)
        _mark(folder).unlink(missing_ok=True)
