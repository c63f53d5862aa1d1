"""Tables of measured figures in README.md and docs, filled from ``launch/results/figures``.

A page asks for a table between two comments, which stay:

    <!-- figures: CASE CASE … | METRIC -->
    <!-- end of figures -->

``METRIC`` may be left out: then the table has every metric of these cases. ``launch/docs figures`` fills all pages and
draws the pictures; a test holds the committed pages against what the data give.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

from benchmarks import charts
from benchmarks.figures import RESULTS, Figure, recorded

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?P<begin><!-- figures: (?P<cases>[^|>]+?)(?: \| (?P<metric>[^>]+?))? -->\n).*?(?P<end><!-- end of figures -->)",
    re.DOTALL,
)
CONDITIONS = {
    "model": "model",
    "machine": "machine",
    "cards": "GPUs",
    "tp": "TP",
    "setting": "setting",
    "requests": "requests",
    "prompt": "prompt, tokens",
    "output": "answer, tokens",
    "tokens": "tokens",
}
"""Columns by field, in the order of a table; a field that is the same in all rows stands below it."""
OF_THE_RUN = {"peer": "peer", "date": "date", "code": "code", "source": "recorded"}
TITLES = {"metric": "what"} | CONDITIONS | OF_THE_RUN


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str, folder: Path, figures: Sequence[Figure]) -> str:
    """A page's text with its tables as ``figures`` give them; ``folder`` is the page's, for links.

    Raises:
        ValueError: a page asks for a case or a metric that has no figure.
    """

    def fill(match: re.Match[str]) -> str:
        cases, metric = match["cases"].split(), match["metric"]
        found = []
        for case in cases:
            those = [one for one in figures if one.case == case and metric in (None, one.metric)]
            if not those:
                raise ValueError(f"{match['begin'].strip()}: expected figures of {case}, found none")
            found += those
        return f"{match['begin']}\n" + "\n".join(table(found, folder)) + f"\n\n{match['end']}"

    return BLOCK.sub(fill, text)


def table(figures: Sequence[Figure], folder: Path) -> Iterator[str]:
    """Lines of a Markdown table, of what all of its rows share, and of their notes.

    Without peers, the figures of different numbers of tokens or requests stand beside each other, else below.
    """
    figures = ordered(figures)
    peers = any(one.peer_value is not None for one in figures)
    across = None if peers else next((name for name in ("tokens", "requests") if varies(figures, name, folder)), None)
    names = [name for name in ("metric", *CONDITIONS) if name != across and varies(figures, name, folder)]
    runs = [name for name in OF_THE_RUN if varies(figures, name, folder)]
    rows: dict[tuple[str, ...], list[Figure]] = {}
    for one in figures:
        rows.setdefault(tuple(shown(one, name, folder) for name in (*names, *runs)), []).append(one)
    columns = sorted({getattr(one, across) or 0 for one in figures}) if across else []
    head = [TITLES[name] for name in names]
    if across:
        head += [f"{count:,} {across if count > 1 else across[:-1]}" for count in columns]
    else:
        head += ["ours", "peer", "ours / peer"] if peers else ["figure"]
    yield row([*head, *(TITLES[name] for name in runs)])
    yield row(["---"] * (len(head) + len(runs)))
    for cells, those in rows.items():
        if across:
            found = {getattr(one, across) or 0: measured(one.value, one.unit) for one in those}
            lines = [[found.get(count, "") for count in columns]]
        else:
            lines = [beside(one) if peers else [measured(one.value, one.unit)] for one in those]
        for line in lines:
            yield row([*cells[: len(names)], *line, *cells[len(names) :]])
    yield ""
    caption = "; ".join(shared(figures, folder))
    yield f"{caption[0].upper()}{caption[1:]}."
    notes: dict[str, list[str]] = {}
    several = varies(figures, "cards", folder)
    for one in figures:
        if one.note:
            notes.setdefault(one.note, []).append(place(one) + (f" on {one.cards} GPUs" if several else ""))
    for number, (note, places) in enumerate(notes.items()):
        yield ("" if number else "\n") + f"* {' and '.join(places)}: {note}."


def ordered(figures: Sequence[Figure]) -> list[Figure]:
    """By metric and setting as they first come, then by TP, prompt, requests and tokens."""
    first = {name: list(dict.fromkeys(getattr(one, name) for one in figures)) for name in ("metric", "setting")}
    numbers = ("tp", "prompt", "requests", "tokens")

    def place(one: Figure) -> tuple[int, ...]:
        words = (order.index(getattr(one, name)) for name, order in first.items())
        return (*words, *(getattr(one, name) or 0 for name in numbers))

    return sorted(figures, key=place)


def varies(figures: Sequence[Figure], name: str, folder: Path) -> bool:
    """Whether a table of ``figures`` needs a column for a field; a missing peer is an empty cell beside."""
    values = {shown(one, name, folder) for one in figures}
    return len(values - {""} if name == "peer" else values) > 1


def beside(one: Figure) -> list[str]:
    if one.peer_value is None or one.ratio is None:
        return [measured(one.value, one.unit), "", ""]
    return [measured(one.value, one.unit), measured(one.peer_value, one.unit), f"{one.ratio:.2f}"]


def shared(figures: Sequence[Figure], folder: Path) -> Iterator[str]:
    """The fields that all rows have in common, in words."""
    for name, title in TITLES.items():
        values = {shown(one, name, folder) for one in figures} - ({""} if name == "peer" else set())
        if len(values) == 1 and (value := values.pop()):
            yield value if name in ("metric", "model", "machine", "setting", "source") else f"{title}: {value}"


def place(one: Figure) -> str:
    """The row that a note belongs to, in words."""
    count = one.requests or one.tokens
    return one.metric + (f" at {count} {'requests' if one.requests else 'tokens'}" if count else "")


def shown(one: Figure, name: str, folder: Path) -> str:
    value = getattr(one, name)
    if value is None:
        return "not recorded" if name == "code" else ""
    if name == "source" and value.endswith(".md"):
        return f"[notebook]({Path(os.path.relpath(RESULTS / value, folder)).as_posix()})"
    if name in ("source", "setting") and value.startswith(("-", "launch/")):
        return f"`{value}`"
    return f"{value:,}" if isinstance(value, int) else str(value)


def measured(value: Decimal, unit: str) -> str:
    """A value as pages write it: ``3.79 ms``, ``1,987 tokens/s``."""
    return f"{value:,} {unit}"


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    argparse.ArgumentParser(prog="launch/docs figures", description=(__doc__ or "").splitlines()[0]).parse_args()
    figures = recorded()
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text, page.parent, figures)) != text:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    charts.draw_all()


if __name__ == "__main__":
    main()
