"""Reads a record of passes, and checks each line once, so that later code can rely on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import shown
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.tracing.contents import FORMAT, SKETCH

MAX_INTEGER = 2**63 - 1
"""Ids, positions and counts are recorded from int64."""
MAX_DIMENSIONS = 8
AGAIN = "the file is damaged; record the run again"


@dataclass(frozen=True)
class Op:
    """A boundary's output: shape, number of NaN and infinite values, and rms, sketch and digest of a sample."""

    name: str
    shape: list[int]
    nan: int
    inf: int
    rms: float
    sketch: list[float]
    digest: str


@dataclass(frozen=True)
class RecordedPass:
    """A pass.

    Attributes:
        line: of the file, from 1. ids, positions: what was fed, as long as each other, at least one.
        digests: of ids and positions. ops: in the order in which they ran.
        chose: the token that followed; ``None`` where the record does not tell.
    """

    line: int
    ids: list[int]
    positions: list[int]
    digests: list[str]
    ops: dict[str, Op]
    chose: int | None

    @property
    def is_one_sequence(self) -> bool:
        """Whether the pass is of one request, by its positions."""
        return self.positions == list(range(self.positions[0], self.positions[0] + len(self.positions)))


@dataclass(frozen=True)
class Record:
    """The passes of one rank of a run on ``ranks``; ``mode`` is its activation_mode."""

    file: Path
    mode: ActivationMode
    rank: int
    ranks: int
    passes: list[RecordedPass]


def read_record(file: Path) -> Record:
    """The record in ``file``, which may be a pipe: it is read once.

    Raises:
        ConfigError: it cannot be read, or a line is not as :mod:`.record` writes it; names file, line and field.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file}: expected a record of passes, found {error.strerror}") from error
    ended = not lines[-1]
    if ended:
        lines.pop()
    if not lines:
        raise ConfigError(f"{file}: expected a record of passes, found an empty file; {AGAIN}")
    head = _Line(file, 1, lines[0], whole=True)
    if head.values.get("format") != FORMAT:
        raise ConfigError(
            f"{file}: line 1, field 'format': expected a first line with format {FORMAT}, found"
            f" {head.found('format')}; record it with NVFP4_SGL_TRACE"
        )
    modes = {mode.value: mode for mode in ActivationMode}
    mode = modes[head.field("mode", " or ".join(modes), lambda value: isinstance(value, str) and value in modes)]
    ranks = head.integer("ranks", least=1)
    rank = head.integer("rank", most=ranks - 1)
    last = len(lines)
    passes = [_pass(_Line(file, n, text, whole=ended or n < last)) for n, text in enumerate(lines[1:], 2)]
    return Record(file, mode, rank, ranks, passes)


def _pass(line: _Line) -> RecordedPass:
    line.integer("pass", least=line.number - 2, most=line.number - 2)
    ids, positions = line.integers("ids"), line.integers("positions")
    if len(ids) != len(positions):
        raise line.fail("positions", f"as many as ids, {len(ids)}", str(len(positions)))
    digests = line.field("input", "two digests", _is_digests)
    chose = line.integer("chose") if line.values.get("chose") is not None else None
    ops: dict[str, Op] = {}
    for place, values in enumerate(line.field("ops", "a list with at least one op", _is_filled)):
        op = _op(line.within(f"ops[{place}]", values))
        if op.name in ops:
            raise line.fail(f"ops[{place}].name", "each op once", f"{shown(op.name)} again")
        ops[op.name] = op
    return RecordedPass(line.number, ids, positions, digests, ops, chose)


def _op(line: _Line) -> Op:
    return Op(
        line.field("name", "a name", _is_text),
        line.integers("shape", least=1, longest=MAX_DIMENSIONS),
        line.integer("nan"),
        line.integer("inf"),
        line.field("rms", "a number that is not negative", lambda value: _is_number(value) and not value < 0),
        line.field("sketch", f"{SKETCH} numbers", _is_sketch),
        line.field("digest", "a digest", _is_text),
    )


class _Line:
    """An object of a line, the whole one or one within; every complaint names file, line and field.

    Args:
        whole: whether the line has its end.
    """

    def __init__(self, file: Path, number: int, text: bytes, *, whole: bool):
        self.file, self.number, self.stem = file, number, ""
        try:
            values = json.loads(text)
        except RecursionError as error:
            raise ConfigError(f"{self}: expected an object, found one that is nested too deeply; {AGAIN}") from error
        except ValueError as error:
            if whole:
                raise ConfigError(f"{self}: expected an object of JSON, found {_shown_text(text)}; {AGAIN}") from error
            before = "delete that line to compare the passes before it, or " if number > 2 else ""
            raise ConfigError(
                f"{self}: expected a whole line, found the record cut off there, after {len(text)} bytes. The run was"
                f" ended, or the disk was full, while it was written; {before}record the run again"
            ) from error
        self.values = self._object(values)

    def __str__(self) -> str:
        return f"{self.file}: line {self.number}"

    def within(self, stem: str, values: object) -> _Line:
        """The object ``values``, which this line has at ``stem``."""
        inner = object.__new__(_Line)
        inner.file, inner.number, inner.stem = self.file, self.number, f"{stem}."
        inner.values = inner._object(values)
        return inner

    def _object(self, values: object) -> dict[str, Any]:
        if isinstance(values, dict):
            return values
        where = f", field '{self.stem.removesuffix('.')}'" if self.stem else ""
        raise ConfigError(f"{self}{where}: expected an object, found {shown(values)}; {AGAIN}")

    def found(self, field: str) -> str:
        return shown(self.values[field]) if field in self.values else "nothing"

    def fail(self, field: str, expected: str, found: str) -> ConfigError:
        return ConfigError(f"{self}, field '{self.stem}{field}': expected {expected}, found {found}; {AGAIN}")

    def field(self, field: str, expected: str, takes: Callable[[Any], bool]) -> Any:
        if field not in self.values or not takes(self.values[field]):
            raise self.fail(field, expected, self.found(field))
        return self.values[field]

    def integer(self, field: str, *, least: int = 0, most: int = MAX_INTEGER) -> int:
        expected = f"a whole number from {least}" + (f" to {most}" if most < MAX_INTEGER else "")
        return int(self.field(field, expected if least < most else str(least), lambda x: _is_integer(x, least, most)))

    def integers(self, field: str, *, least: int = 0, longest: int | None = None) -> list[int]:
        """A list of at least one."""

        def takes(value: Any) -> bool:
            fits = _is_filled(value) and (longest is None or len(value) <= longest)
            return fits and all(_is_integer(each, least, MAX_INTEGER) for each in value)

        found: list[int] = self.field(field, f"a list of whole numbers from {least}, at least one", takes)
        return found


def _shown_text(text: bytes) -> str:
    """A line's text, cut where it gets long."""
    return shown(text.decode(errors="replace"))


def _is_integer(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    """A number that floats hold; NaN and infinities are, and depart where they are compared."""
    return isinstance(value, float) or _is_integer(value, -MAX_INTEGER, MAX_INTEGER)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_filled(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_digests(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_text, value))


def _is_sketch(value: object) -> bool:
    return isinstance(value, list) and len(value) == SKETCH and all(map(_is_number, value))
