"""Options of a conversion."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.errors import ConfigError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class Scales(enum.Enum):
    """Ways to choose block scales."""

    MAX = "max"
    """By a block's maximum, ModelOpt's recipe."""
    MSE = "mse"
    """By a block's squared error."""


@dataclass(frozen=True)
class Options:
    """The options that decide what is written.

    Attributes:
        classes: what becomes NVFP4; other matrices stay as they are stored.
        scales: of matrices that are quantised.
        tie_gate_up: gate and up of an expert share a global scale where they are quantised or cast.
        shard_size: bytes of a file at most, unless a single tensor is larger.
        drafts: matrices of these classes become NVFP4 in drafts, too.
    """

    classes: frozenset[MatrixClass] = frozenset(MatrixClass)
    scales: Scales = Scales.MAX
    tie_gate_up: bool = False
    shard_size: int = 5 * 10**9
    drafts: bool = False

    def as_json(self) -> dict[str, Any]:
        """For records and the manifest."""
        return {
            "classes": [kind.value for kind in MatrixClass if kind in self.classes],
            "scales": self.scales.value,
            "tie_gate_up": self.tie_gate_up,
            "shard_size": self.shard_size,
            "drafts": self.drafts,
        }


def as_flag(field: str, value: Any) -> tuple[str, str]:
    """The flag that a field of :meth:`Options.as_json` comes from, and its value as it is typed there."""
    match field, value:
        case "classes", list():
            everything = [kind.value for kind in MatrixClass]
            return "--only", "all classes" if value == everything else ",".join(map(str, value))
        case "drafts", bool():
            return "--drafts", "nvfp4" if value else "keep"
        case _, bool():
            return f"--{field.replace('_', '-')}", "on" if value else "off"
    return f"--{field.replace('_', '-')}", str(value)


def parse_size(text: str) -> int:
    """Bytes of ``5GB``, ``500M``, ``4GiB`` or a plain number; ValueError for anything else."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMG]i?)?B?", text.strip())
    size = int(float(found[1]) * UNITS[found[2] or ""]) if found else 0
    if size < 1:
        raise ValueError(f"expected a size such as 5GB, 500MB or 4GiB, found '{text}'")
    return size


def parse_classes(text: str) -> frozenset[MatrixClass]:
    """Classes of a comma-separated list; ValueError names the first unknown one."""
    known = {kind.value: kind for kind in MatrixClass}
    for name in text.split(","):
        if name not in known:
            raise ValueError(f"expected classes among {', '.join(known)}, separated by commas, found '{name}'")
    return frozenset(known[name] for name in text.split(","))


ALL, DRAFTS = "all", "drafts"
"""Words of ``convert_at_load``: every class; and the matrices of the chosen classes in drafts, too."""


def parse_at_load(value: object) -> Options:
    """Options of the override ``convert_at_load``: ``all`` or classes as of :func:`parse_classes`, and ``drafts``.

    Raises:
        ConfigError: it names something else.
    """
    words = str(value).split(",") if isinstance(value, str) else [str(value)]
    classes = ",".join(word for word in words if word != DRAFTS)
    try:
        chosen = frozenset(MatrixClass) if classes == ALL else parse_classes(classes)
    except ValueError as error:
        expected = str(error).removeprefix("expected ")
        raise ConfigError(f"convert_at_load: expected {ALL}, or {expected}; '{DRAFTS}' may be added") from error
    return Options(chosen, drafts=DRAFTS in words)
