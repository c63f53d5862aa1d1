"""nvfp4_sgl_manifest.json: the source of a converted checkpoint, and a checksum of each of its tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.safetensors_header import Entry
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.files import MANIFEST, MAX_INDEX_BYTES, became_shorter, fetch_again, read_json, shown

FILE = MANIFEST
TENSORS = "tensors"
"""Field of the manifest: SHA-256 of a tensor's bytes, by its name in the file."""
BUFFER = 16 << 20


def check(inventory: Inventory) -> list[str]:
    """Hold every tensor, drafts included, against the manifest; one line for each that differs.

    Raises:
        CheckpointError: there is no manifest, or it has no checksums.
    """
    expected = read(inventory.directory)
    entries = {entry.name: entry for entry in inventory.entries.values()}
    problems = [f"{shown(name)}: in {FILE}, but in no file" for name in expected if name not in entries]
    problems += [
        f"'{name}' in {entry.file.name}: not in {FILE}" for name, entry in entries.items() if name not in expected
    ]
    # File by file in the order of the data: a disk reads on, and a file is open once.
    ordered = sorted((entry for name, entry in entries.items() if name in expected), key=lambda e: (e.file, e.offset))
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for entry, found in zip(ordered, pool.map(checksum, ordered), strict=True):
            if found != expected[entry.name]:
                wanted = shown(expected[entry.name])
                problems.append(f"'{entry.name}' in {entry.file.name}: expected SHA-256 {wanted}, found {found}")
    return problems


def read(directory: Path) -> Mapping[str, object]:
    """The manifest's checksums by name."""
    remedy = "only what 'nvfp4-sgl convert' wrote has checksums"
    manifest = read_json(directory / FILE, CheckpointError, MAX_INDEX_BYTES, remedy)
    tensors = manifest.get(TENSORS) if isinstance(manifest, dict) else None
    if not isinstance(tensors, dict):
        raise CheckpointError(
            f"{directory / FILE}: expected an object '{TENSORS}', found {shown(tensors)};"
            f" {fetch_again(directory / FILE)}"
        )
    return tensors


def checksum(entry: Entry) -> str:
    """SHA-256 of a tensor's bytes."""
    digest = hashlib.sha256()
    for piece in stored_bytes(entry):
        digest.update(piece)
    return digest.hexdigest()


def stored_bytes(entry: Entry) -> Iterator[bytes]:
    """The bytes of a tensor, as they are in its file."""
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset)
            left = entry.nbytes
            while left:
                piece = stream.read(min(left, BUFFER))
                if not piece:
                    raise became_shorter(entry.file)
                left -= len(piece)
                yield piece
    except OSError as error:
        raise CheckpointError(f"{entry.file}: cannot be read ({error.strerror})") from error
