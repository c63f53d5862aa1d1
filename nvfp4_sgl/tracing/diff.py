"""Compares two recorded runs and names the first op that departs."""

from __future__ import annotations

import itertools
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


@dataclass(frozen=True)
class PassTokens:
    """Tokens of one pass in two runs.

    Attributes:
        ids, positions: what both were fed. chose: the token that follows in either run; ``None`` where a record does
            not tell.
    """

    number: int
    ids: list[int]
    positions: list[int]
    chose: tuple[int | None, int | None]

    @property
    def departs(self) -> bool:
        """Whether the runs chose different tokens."""
        return None not in self.chose and self.chose[0] != self.chose[1]


class OtherTokens(ConfigError):
    """Two runs were fed different tokens in pass ``number``."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


def tokens_of(first: Path, second: Path) -> list[PassTokens]:
    """What two runs were fed and chose, up to the first pass that was fed different tokens."""
    one, other = list(passes(first)), list(passes(second))
    found = []
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a["input"] != b["input"]:
            break
        found.append(PassTokens(number, a["ids"], a["positions"], (_chose(one, number), _chose(other, number))))
    return found


def _chose(records: list[dict[str, Any]], number: int) -> int | None:
    """The token that pass ``number`` chose: as recorded, or what the next pass continues the same sequence with."""
    record = records[number]
    if "chose" in record or number + 1 == len(records):
        return record.get("chose")
    following = records[number + 1]
    continues = following["positions"][0] == record["positions"][-1] + 1
    return following["ids"][0] if continues and is_one_sequence(record) else None


def is_one_sequence(record: dict[str, Any]) -> bool:
    """Whether a pass is of one request, by its positions."""
    positions = record["positions"]
    return positions == list(range(positions[0], positions[0] + len(positions)))


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """Op by op, in the order in which the first run made them.

    Raises:
        ConfigError: a file is no record, or the runs had other ops.
        OtherTokens: the runs were fed different tokens; what came before is yielded first.
    """
    for number, (one, other) in enumerate(zip(passes(first), passes(second), strict=False)):
        if one["input"] != other["input"]:
            raise OtherTokens(_told(number, one, other, first, second), number)
        theirs = {op["name"]: op for op in other["ops"]}
        for op in one["ops"]:
            if op["name"] not in theirs:
                raise ConfigError(f"{op['name']}: in pass {number} of {first}, not of {second}; record the same model")
            yield _difference(number, op, theirs[op["name"]])


def _told(number: int, one: dict[str, Any], other: dict[str, Any], first: Path, second: Path) -> str:
    """The message for a pass with other tokens, which names the first that differs."""
    fed, also = (list(zip(run["positions"], run["ids"], strict=True)) for run in (one, other))
    pairs = ((a, b) for a, b in itertools.zip_longest(fed, also) if a != b)
    a, b = (f"token {pair[1]} at position {pair[0]}" if pair else "no further token" for pair in next(pairs))
    return (
        f"pass {number}: expected the same tokens at the same positions, found {a} in {first} and {b} in {second}; send"
        " both servers the same requests, one at a time, or name the checkpoint instead of the second record, to feed"
        " it the first one's tokens"
    )


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


def passes(path: Path) -> Iterator[dict[str, Any]]:
    """The recorded passes of a file, in their order."""
    try:
        lines = path.read_text().splitlines()
        records = [json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: expected a record of passes, found {error}") from error
    if not records or not isinstance(records[0], dict) or records[0].get("format") != FORMAT:
        raise ConfigError(f"{path}: expected a first line with format {FORMAT}; record it with NVFP4_SGL_TRACE")
    return iter(records[1:])
