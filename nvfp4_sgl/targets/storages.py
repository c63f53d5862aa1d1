"""Storages by target: the table of how each is run, which docs/formats.md prints.

What counts is how a matrix arrives from its decoder (:mod:`nvfp4_sgl.checkpoint.decoders`).
"""

from __future__ import annotations

from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.targets.arrival import Arrival
from nvfp4_sgl.targets.target import descriptor, words


def how(target: str, storage: Storage) -> str | None:
    """The operands of ``target`` for a matrix in ``storage``; ``None`` if it does not run it."""
    return descriptor(target).runs[Arrival.of(storage)]


def table() -> str:
    """The table in Markdown, as docs/formats.md prints it."""
    head = ["storage", "stored as", *words()]
    rows = [head, ["---"] * len(head)]
    for storage in sorted(Storage, key=lambda storage: (not storage.is_nvfp4, storage.value)):
        parts = ", ".join(_part(storage, index) for index in range(len(storage.decoder.parts)))
        rows.append([storage.value, parts, *(how(target, storage) or "refused" for target in words())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _part(storage: Storage, index: int) -> str:
    part = storage.decoder.parts[index]
    names = " or ".join(f"`.{suffix}`" for suffix in part.suffixes)
    per = "scalar" if part.unit is None else "" if part.unit == (1, 1) else f"per {part.unit[0]} × {part.unit[1]}"
    cells = [names, "/".join(part.dtypes), per, "(optional, unused)" if part.optional else ""]
    return " ".join(cell for cell in cells if cell)
