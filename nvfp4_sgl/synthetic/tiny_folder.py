"""Directories that a tiny checkpoint may be written to."""

from __future__ import annotations

from pathlib import Path

from nvfp4_sgl.errors import CheckpointError

MARKER = "nvfp4_sgl_tiny.json"
"""Marks a directory as a tiny checkpoint; only such a directory is ever overwritten."""


def require_replaceable(directory: Path, force: bool) -> None:
    """Refuse a ``directory`` that holds anything but, with ``force``, an earlier tiny checkpoint; nothing is changed.

    Raises:
        CheckpointError: it holds other files.
    """
    if not directory.exists() or not any(directory.iterdir()):
        return
    if not force:
        raise CheckpointError(f"{directory}: not empty; name an empty directory, or pass --force to replace")
    if not (directory / MARKER).is_file():
        raise CheckpointError(
            f"{directory}: expected {MARKER}, since only a tiny checkpoint is ever replaced, found other files; name an"
            " empty directory"
        )
