"""Which storage runs how on which target: one table, by which targets refuse matrices and which docs/formats.md prints.

What counts is how a matrix arrives from its decoder (:mod:`nvfp4_sgl.checkpoint.decoders`): as NVFP4 or as values.
"""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.targets.choose import Target

PACKED, VALUES = True, False
"""How a matrix arrives: :attr:`Storage.is_nvfp4`."""

RUNS: Mapping[Target, Mapping[bool, str | None]] = {
    Target.CPU: {
        PACKED: "decoded to fp32 at load, global scale apart",
        VALUES: "fp32",
    },
    Target.SM90: {
        PACKED: "packed, expanded in registers (routed experts: if all of the layer are; else bf16)",
        VALUES: "bf16, rounded at load",
    },
    Target.SM100: {
        PACKED: "packed, on the NVFP4 tensor cores",
        VALUES: None,
    },
}
"""What a target multiplies with; ``None`` if it refuses the matrix."""


def how(target: Target, storage: Storage) -> str | None:
    """What ``target`` multiplies with where a matrix is in ``storage``; ``None`` if it does not run it."""
    return RUNS[target][storage.is_nvfp4]


def table() -> str:
    """The table in Markdown, as docs/formats.md prints it."""
    head = ["storage", "stored as", *(target.value for target in Target)]
    rows = [head, ["---"] * len(head)]
    for storage in sorted(Storage, key=lambda storage: (not storage.is_nvfp4, storage.value)):
        parts = ", ".join(_part(storage, index) for index in range(len(storage.decoder.parts)))
        rows.append([storage.value, parts, *(how(target, storage) or "refused" for target in Target)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _part(storage: Storage, index: int) -> str:
    part = storage.decoder.parts[index]
    names = " or ".join(f"`.{suffix}`" for suffix in part.suffixes)
    per = "scalar" if part.unit is None else "" if part.unit == (1, 1) else f"per {part.unit[0]} × {part.unit[1]}"
    words = [names, "/".join(part.dtypes), per, "(optional, unused)" if part.optional else ""]
    return " ".join(word for word in words if word)
