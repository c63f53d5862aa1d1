"""Compares two recorded runs and names the first op that departs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.tracing.contents import RANK_LOCAL, SAMPLED_VALUES
from nvfp4_sgl.tracing.reading import Op, Record, RecordedPass


@dataclass(frozen=True)
class Difference:
    """An op of one pass in two runs.

    Attributes:
        number: of the pass. name: of the op.
        error: estimate of the root mean square of the difference by that of the first run; infinite if the second has
            NaN or infinities and the first has none, values of another shape, or figures that are no numbers.
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


def tokens_of(first: Record, second: Record) -> list[PassTokens]:
    """Tokens that two runs were fed and chose, up to the first pass that was fed different ones."""
    found = []
    for number, (a, b) in enumerate(zip(first.passes, second.passes, strict=False)):
        if not _same_tokens(a, b):
            break
        chose = _chose(first.passes, number), _chose(second.passes, number)
        found.append(PassTokens(number, a.ids, a.positions, chose))
    return found


def _same_tokens(a: RecordedPass, b: RecordedPass) -> bool:
    return a.ids == b.ids and a.positions == b.positions


def _chose(passes: list[RecordedPass], number: int) -> int | None:
    """The token that pass ``number`` chose: as recorded, or what the next pass continues the same sequence with."""
    here = passes[number]
    if here.chose is not None or number + 1 == len(passes):
        return here.chose
    following = passes[number + 1]
    continues = following.positions[0] == here.positions[-1] + 1
    return following.ids[0] if continues and here.is_one_sequence else None


def left_out(first: Record, second: Record) -> tuple[str, ...]:
    """Boundaries of a layer that are not compared: ranks hold their own values there, and the runs' ranks differ."""
    return RANK_LOCAL if (first.rank, first.ranks) != (second.rank, second.ranks) else ()


def differences(first: Record, second: Record) -> Iterator[Difference]:
    """Op by op, in the order in which the first run made them, as far as both have passes.

    Raises:
        ConfigError: the runs had other ops, or none but those of :func:`left_out`; a record contradicts itself.
        OtherTokens: the runs were fed different tokens; what came before is yielded first.
    """
    without = left_out(first, second)
    for number, (one, other) in enumerate(zip(first.passes, second.passes, strict=False)):
        if not _same_tokens(one, other):
            raise OtherTokens(_told(number, one, other, first, second), number)
        if one.digests != other.digests:
            raise ConfigError(
                f"{first.file} and {second.file}, line {one.line}, field 'input': expected equal digests of equal"
                f" tokens, found {one.digests} and {other.digests}; one of the files is damaged: record the runs again"
            )
        for ours, theirs, here, there in ((one, other, first, second), (other, one, second, first)):
            lacking = next((name for name in ours.ops if name not in theirs.ops), None)
            if lacking is not None:
                raise ConfigError(
                    f"{lacking}: in pass {number} of {here.file}, not of {there.file}; record the same model"
                )
        names = [name for name in one.ops if _boundary(name) not in without]
        if not names:
            raise ConfigError(
                f"{first.file} is of rank {first.rank} of {first.ranks}, {second.file} of rank {second.rank} of"
                f" {second.ranks}. Expected ops with the same values on both in pass {number}, found only ranks' own,"
                f" {', '.join(one.ops)}; record runs of the same number of ranks"
            )
        for name in names:
            yield _difference(number, one.ops[name], other.ops[name])


def _boundary(name: str) -> str:
    """``attn.wo_b`` of ``layers.3.attn.wo_b``."""
    return re.sub(r"^layers\.\d+\.", "", name)


def _told(number: int, one: RecordedPass, other: RecordedPass, first: Record, second: Record) -> str:
    """The message for a pass with other tokens, with the first that differs."""
    fed, also = (list(zip(run.positions, run.ids, strict=True)) for run in (one, other))
    pairs = ((a, b) for a, b in itertools.zip_longest(fed, also) if a != b)
    a, b = (f"token {pair[1]} at position {pair[0]}" if pair else "no further token" for pair in next(pairs))
    return (
        f"pass {number}: expected the same tokens at the same positions, found {a} in {first.file} and {b} in"
        f" {second.file}. Send both servers the same requests, one at a time, or name the checkpoint instead of the"
        " second record, to feed it the first one's tokens"
    )


def _difference(number: int, op: Op, other: Op) -> Difference:
    name = op.name
    if op.shape != other.shape:
        return Difference(number, name, math.inf, False, f"shape {op.shape} and {other.shape}")
    if other.nan + other.inf and not op.nan + op.inf:
        return Difference(number, name, math.inf, False, f"{other.nan} NaN, {other.inf} infinite")
    size = op.rms * math.sqrt(_sampled(op.shape))
    distance = math.dist(op.sketch, other.sketch) / math.sqrt(len(op.sketch))
    if not (math.isfinite(size) and math.isfinite(distance) and math.isfinite(other.rms)):
        why = f"rms {op.rms:g} and {other.rms:g}, sketches {distance:g} apart: expected finite numbers"
        return Difference(number, name, math.inf, False, why)
    error = distance / size if size else (math.inf if distance else 0.0)
    return Difference(number, name, error, op.digest == other.digest)


def _sampled(shape: list[int]) -> int:
    """Values of an output of which a sketch is made."""
    total = math.prod(shape)
    step = -(-total // SAMPLED_VALUES)
    return -(-shape[0] // step) * (total // shape[0])
