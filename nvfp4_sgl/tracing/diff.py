"""Compares two recorded runs and names the first op that departs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.tracing.contents import FORMAT, SAMPLED_VALUES


@dataclass(frozen=True)
class Difference:
    """An op of one pass in two runs.

    Attributes:
        number: of the pass. name: of the op.
        error: estimate of the root mean square of the difference by that of the first run; infinite if the second has
            NaN or infinities and the first has none, or values of another shape.
        equal: whether all bits of the sample are.
        why: what makes the error infinite.
    """

    number: int
    name: str
    error: float
    equal: bool
    why: str = ""


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """Op by op, in the order in which the first run made them.

    Raises:
        ConfigError: a file is no record, or the runs had other inputs or ops.
    """
    for number, (one, other) in enumerate(zip(_passes(first), _passes(second), strict=False)):
        if one["input"] != other["input"]:
            raise ConfigError(
                f"pass {number}: expected the same tokens at the same positions, found {one['tokens']} in {first} and"
                f" {other['tokens']} in {second}; send both servers the same requests, one at a time"
            )
        theirs = {op["name"]: op for op in other["ops"]}
        for op in one["ops"]:
            if op["name"] not in theirs:
                raise ConfigError(f"{op['name']}: in pass {number} of {first}, not of {second}; record the same model")
            yield _difference(number, op, theirs[op["name"]])


def _difference(number: int, op: dict[str, Any], other: dict[str, Any]) -> Difference:
    name = op["name"]
    if op["shape"] != other["shape"]:
        return Difference(number, name, math.inf, False, f"shape {op['shape']} and {other['shape']}")
    if other["nan"] + other["inf"] and not op["nan"] + op["inf"]:
        return Difference(number, name, math.inf, False, f"{other['nan']} NaN, {other['inf']} infinite")
    values = _sampled(op["shape"])
    projected = [(a - b) ** 2 for a, b in zip(op["sketch"], other["sketch"], strict=True)]
    size = op["rms"] * math.sqrt(values)
    distance = math.sqrt(sum(projected) / len(projected))
    error = distance / size if size else (math.inf if distance else 0.0)
    return Difference(number, name, error, op["digest"] == other["digest"])


def _sampled(shape: list[int]) -> int:
    """Values of an output of which a sketch is made."""
    total = math.prod(shape)
    step = -(-total // SAMPLED_VALUES)
    return -(-shape[0] // step) * (total // shape[0])


def _passes(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a record of passes, found {error}") from error
    if not records or not isinstance(records[0], dict) or records[0].get("format") != FORMAT:
        raise ConfigError(f"{path}: expected a first line with format {FORMAT}; record it with NVFP4_SGL_TRACE")
    return iter(records[1:])
