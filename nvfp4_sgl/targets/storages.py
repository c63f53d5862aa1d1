"""Which storage runs how on which target: one table, by which targets refuse matrices and which docs/formats.md prints.

What counts is how a matrix arrives from its decoder (:mod:`nvfp4_sgl.checkpoint.decoders`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.targets.choose import Target
from nvfp4_sgl.weights.gemms import Operands


class Arrival(enum.Enum):
    """How a matrix arrives."""

    NVFP4 = "NVFP4"
    MXFP8 = "values that MXFP8 holds exactly"
    SCALED = "values with scales of more bits"
    PLAIN = "values as they are stored"

    @classmethod
    def of(cls, storage: Storage) -> Arrival:
        """How a matrix in ``storage`` arrives."""
        if storage.is_nvfp4:
            return cls.NVFP4
        if storage.is_mxfp8:
            return cls.MXFP8
        return cls.SCALED if storage.decoder.scheme else cls.PLAIN


_NOT_ROUTED = "(routed experts: refused)"
RUNS: Mapping[Target, Mapping[Arrival, str | None]] = {
    Target.CPU: {
        Arrival.NVFP4: "decoded to fp32 at load, global scale apart",
        Arrival.MXFP8: "fp32",
        Arrival.SCALED: "fp32",
        Arrival.PLAIN: "fp32",
    },
    Target.SM90: {
        Arrival.NVFP4: "packed, expanded in registers (routed experts: if all of the layer are; else bf16)",
        Arrival.MXFP8: "packed, expanded in registers (merged with other storages, or a routed expert: bf16)",
        Arrival.SCALED: "bf16, rounded at load",
        Arrival.PLAIN: "bf16, rounded at load",
    },
    Target.SM100: {
        Arrival.NVFP4: "packed, on the NVFP4 tensor cores",
        Arrival.MXFP8: f"every value as it is, on the MXFP8 tensor cores {_NOT_ROUTED}",
        Arrival.SCALED: None,
        Arrival.PLAIN: f"bf16, rounded at load {_NOT_ROUTED}",
    },
}
"""What a target multiplies with; ``None`` if it refuses the matrix."""

_OPERANDS: Mapping[Arrival, Operands] = {Arrival.NVFP4: "nvfp4", Arrival.MXFP8: "mxfp8", Arrival.PLAIN: "bf16"}
_HOPPER_OPERANDS: Mapping[Arrival, Operands] = {Arrival.NVFP4: "nvfp4", Arrival.MXFP8: "fp8"}


def how(target: Target, storage: Storage) -> str | None:
    """What ``target`` multiplies with where a matrix is in ``storage``; ``None`` if it does not run it."""
    return RUNS[target][Arrival.of(storage)]


def sm100_operands(storage: Storage) -> Operands:
    """What the GEMM of a matrix in ``storage``, one that SM100 runs, multiplies there."""
    return _OPERANDS[Arrival.of(storage)]


def hopper_operands(storage: Storage) -> Operands:
    """What a GEMM on Hopper multiplies with bf16 activations where all of its matrices are in ``storage``."""
    return _HOPPER_OPERANDS.get(Arrival.of(storage), "bf16")


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
