"""Measured figures: JSON files of ``launch/results/figures``, and the latest figure of each case.

A file is one run, ``{"run": {…}, "figures": [{…}, …]}``: fields under ``run`` hold for all of its figures. The fields
are those of :class:`Figure`. ``launch/bench_full --record FILE`` writes such a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, get_type_hints

RESULTS = Path(__file__).resolve().parents[1] / "results"
FIGURES = RESULTS / "figures"
DATE = re.compile(r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}Z)?")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure, its conditions and where it comes from.

    Attributes:
        case: what was measured, a word that pages use to ask for its figures.
        metric, unit, value: what the figure is, with the digits that the file has.
        peer, peer_value: what ran beside it, in the same unit.
        model, machine, cards, tp: what was served or multiplied, on which device and on how many.
        requests, prompt, output: requests at once, tokens of each prompt and of each answer.
        tokens, setting: tokens of a pass of a kernel; any other condition, in words.
        date: of the run, with UTC time (``2026-11-26T10:20Z``) where a day has several. code: commit, if recorded.
        source: a file of ``launch/results`` that tells of the run, or the command that made it. note: a caveat.
    """

    case: str
    metric: str
    unit: str
    value: Decimal
    machine: str
    date: str
    source: str
    peer: str | None = None
    peer_value: Decimal | None = None
    model: str | None = None
    cards: int | None = None
    tp: int | None = None
    requests: int | None = None
    prompt: int | None = None
    output: int | None = None
    tokens: int | None = None
    setting: str | None = None
    code: str | None = None
    note: str | None = None

    @property
    def ratio(self) -> Decimal | None:
        """``value`` over ``peer_value``."""
        return None if self.peer_value is None else self.value / self.peer_value

    @property
    def conditions(self) -> tuple[object, ...]:
        """The fields that tell this figure from other cases; a figure of equal conditions is of another run."""
        return tuple(value for name, value in asdict(self).items() if name not in OF_A_RUN)


OF_A_RUN = ("value", "peer", "peer_value", "date", "source", "code", "note")
REQUIRED = tuple(field.name for field in fields(Figure) if field.default is MISSING)
VALUES = ("value", "peer_value")
TYPES = get_type_hints(Figure)


def read(file: Path) -> list[Figure]:
    """The figures of one file.

    Raises:
        ValueError: the file is no run, or a figure lacks a field, has an unknown one or one of another type.
    """
    run = json.loads(file.read_text(encoding="utf-8"), parse_float=Decimal)
    if not isinstance(run, dict) or set(run) != {"run", "figures"} or not run["figures"]:
        raise ValueError(f'{file}: expected {{"run": {{…}}, "figures": [{{…}}, …]}} with at least one figure')
    return [figure(run["run"] | one, f"{file}: figure {number}") for number, one in enumerate(run["figures"])]


def figure(values: dict[str, Any], where: str) -> Figure:
    """``values`` as a figure; ValueError that names ``where`` and the field that is wrong."""
    if missing := [name for name in REQUIRED if values.get(name) is None]:
        raise ValueError(f"{where}: expected {missing[0]}, found none")
    for name, value in values.items():
        if name not in TYPES:
            raise ValueError(f"{where}: {name}: unknown; expected of {', '.join(TYPES)}")
        if name in VALUES and type(value) in (int, float):
            values = values | {name: Decimal(str(value))}
        elif not isinstance(value, TYPES[name]):
            raise ValueError(f"{where}: {name}: expected {TYPES[name]}, found {value!r}")
    if values.get("peer") is None and values.get("peer_value") is not None:
        raise ValueError(f"{where}: peer_value: expected peer beside it, found none")
    if not DATE.fullmatch(values["date"]):
        raise ValueError(f"{where}: date: expected 2026-11-26 or 2026-11-26T10:20Z, found {values['date']!r}")
    if values["source"].endswith(".md") and not (RESULTS / values["source"]).is_file():
        raise ValueError(f"{where}: source: expected a file of launch/results, found {values['source']!r}")
    return Figure(**values)


def latest(figures: Iterable[Figure]) -> list[Figure]:
    """The newest figure of each case under equal conditions, in the order in which cases first come.

    Raises:
        ValueError: two figures of one case have the same date.
    """
    newest: dict[tuple[object, ...], Figure] = {}
    for one in figures:
        other = newest.get(one.conditions)
        if other is not None and other.date == one.date:
            raise ValueError(f"{one.case}, {one.metric}: two figures of {one.date}; add the time of day to their dates")
        if other is None or one.date > other.date:
            newest[one.conditions] = one
    return list(newest.values())


def recorded(folder: Path = FIGURES) -> list[Figure]:
    """The latest figures of all files in ``folder``; see :func:`read` and :func:`latest` for errors."""
    return latest(one for file in sorted(folder.glob("*.json")) for one in read(file))


def write(file: Path, run: dict[str, Any], figures: Sequence[dict[str, Any]]) -> None:
    """Write a file of one run, a figure a line, after checking it as :func:`read` does."""
    for number, one in enumerate(figures):
        figure(run | one, f"{file}: figure {number}")
    lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in figures)
    head = json.dumps(run, ensure_ascii=False, indent=1).replace("\n", "\n ")
    file.write_text(f'{{\n "run": {head},\n "figures": [\n{lines}\n ]\n}}\n', encoding="utf-8")
