"""What a GPU gave: digests of exact results, the values of approximate ones, and on what they were computed."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

RECORD = Path(__file__).with_name("recorded.json")


def digest(result: bytes) -> str:
    """SHA-256, in hexadecimal."""
    return hashlib.sha256(result).hexdigest()


def ulp_distance(left: bytes, right: bytes) -> int:
    """How many f32 values lie between two, at most over all elements; NaN is equal to NaN only, zeros are equal."""
    bits = [np.frombuffer(side, np.uint32).astype(np.int64) for side in (left, right)]
    floats = [np.frombuffer(side, np.float32) for side in (left, right)]
    nan = [np.isnan(side) for side in floats]
    if (nan[0] != nan[1]).any():
        return 1 << 32
    # Numbers in order of size: negative ones count down from zero.
    order = [np.where(side >> 31, -(side & 0x7FFFFFFF), side) for side in bits]
    return int(np.abs(np.where(nan[0], 0, order[0] - order[1])).max())


@dataclass(frozen=True)
class Recording:
    """Results of one GPU.

    Attributes:
        machine: GPU, driver, versions, date.
        digests: SHA-256 by result's name.
        values: raw bytes of results that need not be equal, by name.
    """

    machine: Mapping[str, str]
    digests: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, machine: Mapping[str, str], results: Mapping[str, bytes], approximate: set[str]) -> Recording:
        """Take down results; those named in ``approximate`` with their values."""
        return cls(
            machine,
            {name: digest(result) for name, result in results.items() if name not in approximate},
            {name: result for name, result in results.items() if name in approximate},
        )

    @classmethod
    def load(cls, path: Path = RECORD) -> Recording:
        """Read the file."""
        held = json.loads(path.read_text())
        values = {name: base64.b64decode(text) for name, text in held["values"].items()}
        return cls(held["machine"], held["digests"], values)

    def save(self, path: Path = RECORD) -> None:
        """Write the file."""
        values = {name: base64.b64encode(result).decode() for name, result in self.values.items()}
        held = {"machine": dict(self.machine), "digests": dict(self.digests), "values": values}
        path.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n")

    def agrees(self, name: str, result: bytes, ulp: int | None = None) -> bool:
        """Whether a result is the recorded one, or within ``ulp`` of it if that is given."""
        if ulp is None:
            return self.digests.get(name) == digest(result)
        return name in self.values and ulp_distance(self.values[name], result) <= ulp
