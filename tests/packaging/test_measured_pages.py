"""Measured figures of user pages: tables are filled from launch/results/figures, and prose says what these say."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT
from tests.support import documents
from tests.support.prose import NUMBER, UNITS, figures, number, plain, unit_named

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
from benchmarks import pages
from benchmarks.figures import FIGURES, RESULTS, Figure, read, recorded

NOT_USER_PAGES = ("specification.md", "formats.md")
CAPABILITY = "a compute capability"
DISK = "disk that the environment takes"
EXTRAPOLATED = "an estimate of convert_cpu.md for a whole model"
FORECAST = "bytes of a rank, counted from config.json"
GOAL = "a goal"
LIMIT = "a limit of the server"
NOT_MEASURED: dict[str, dict[str, str]] = {
    "README.md": {"11 GB": DISK},
    "ask_it.md": {"7 ×": "an answer's arithmetic"},
    "benchmarks.md": {
        **dict.fromkeys(("10 ms", "25 ms", "3.5 ms", "12.5 ms", "2 GB/s", "1.2 ×", "90 s", "25 s"), GOAL),
        "24 GB": "size of the files that a benchmark makes",
    },
    "checkpoints.md": {"320 MiB": "size of a buffer"},
    "compatibility.md": dict.fromkeys(("9.0", "10.0", "10.3"), CAPABILITY),
    "contributing.md": {"11 GB": DISK, "45 min": "one run of .ci/run"},
    "convert.md": {
        **dict.fromkeys(("5 GB", "256 MiB"), "a limit of a file's size"),
        **dict.fromkeys(("156 GB", "851 GB", "162 GB", "888 GB"), FORECAST),
        **dict.fromkeys(("9 min", "50 min", "8 min", "44 min", "3 min", "10 min", "13 min", "49 min"), EXTRAPOLATED),
        **dict.fromkeys(("2.5 min", "14 min", "17 min", "95 min", "5.5 min"), EXTRAPOLATED),
    },
    "cookbook.md": dict.fromkeys(
        ("161.7 GB", "81.2 GB", "41.0 GB", "112.8 GB", "20.9 GB", "80 GB", "42.8 GB"), FORECAST
    ),
    "deployment.md": {"20 s": LIMIT},
    "find_the_op.md": {"18 %": "the error of an estimator"},
    "first_light.md": {
        "11 GB": DISK,
        "11 s": "an example of what a step prints",
        **dict.fromkeys(("15 min", "20 min", "40 min", "60 min", "90 min"), "a step's limit of time"),
    },
    "how_it_works.md": {"9.0": CAPABILITY},
    "index.md": {"11 GB": DISK},
    "hopper.md": {"24 GB": "size of the files that a benchmark makes"},
    "security.md": dict.fromkeys(
        ("32 MiB", "128 MiB", "768 MiB", "48 MiB", "512 MiB", "256 KiB", "8 GB", "8 s", "0.25 s"), LIMIT
    ),
    "sm100.md": {**dict.fromkeys(("0.3 %", "12 %"), "a bound of a test"), "18.5 MiB": "size of a workspace"},
}
"""By page: figures in prose that nobody measured, and what they are."""


HELD_ELSEWHERE = {"how_it_works.md": re.compile(r"<!-- launches -->.*?<!-- end -->", re.DOTALL)}
"""By page: a table whose figures another test holds against a notebook (test_how_it_works.py)."""
HEADER_UNIT = re.compile(rf"(?:^|[ ,(/])(?P<unit>{'|'.join(UNITS)})")
BARE = re.compile(rf"[~≈<>≤≥]? ?({NUMBER})(?![^ ,;])")


def own_words(page: str, text: str) -> str:
    """A page, its code too, without filled tables and the addresses of links."""
    for pattern in (pages.BLOCK, HELD_ELSEWHERE.get(page), re.compile(r"\]\([^)]*\)")):
        text = pattern.sub(" ", text) if pattern else text
    return text


def said(text: str) -> Iterator[tuple[Decimal, str]]:
    """(number, unit) of each figure in prose and in tables, where the unit may stand in the head of column or row.

    A number with a fraction alone in a cell is a figure, too, of a unit that stands nowhere.
    """
    yield from figures(text)
    head: list[str] = []
    for line in text.splitlines():
        cells = [plain(cell).strip() for cell in line.strip().strip("|").split("|")] if "|" in line else []
        head = (head or cells) if cells else []
        for column, cell in enumerate(cells):
            heads = (*head[column : column + 1], cells[0])
            unit = next((match["unit"] for one in heads if (match := HEADER_UNIT.search(one))), None)
            bare = None if any(figures(cell)) else BARE.match(cell)
            if bare and (unit or ("." in bare[1] and bare.end() == len(cell))):
                yield number(bare[1]), unit_named(unit) if unit else ""


def held(recorded: list[Figure]) -> set[tuple[Decimal, str]]:
    """What the data hold: values, peers' values and ratios, both ways, to two decimals."""
    found = set()
    for one in recorded:
        found.add((one.value, one.unit))
        if one.peer_value is not None and one.ratio is not None:
            found.add((one.peer_value, one.unit))
            found |= {(ratio.quantize(Decimal("0.01"), ROUND_HALF_UP), "×") for ratio in (one.ratio, 1 / one.ratio)}
    return found


def unknown(page: str, text: str, data: set[tuple[Decimal, str]]) -> list[str]:
    return [
        f"{value} {unit}".strip()
        for value, unit in said(own_words(page, text))
        if (value, unit) not in data and f"{value} {unit}".strip() not in NOT_MEASURED.get(page, {})
    ]


def user_pages() -> list[Path]:
    return [page for page in documents.pages() if page.name not in NOT_USER_PAGES]


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_tables_of_a_page_are_what_the_data_give(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.filled(text, page.parent, recorded()) == text, "fill it again: launch/docs figures"


@pytest.mark.parametrize("page", user_pages(), ids=lambda page: page.name)
def test_a_user_page_says_no_figure_that_the_data_do_not_hold(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not unknown(page.name, text, held(recorded())), (
        f"{page.name} has figures without a source: record what was measured in launch/results (a notebook, and"
        " launch/results/figures), or list what was not measured in NOT_MEASURED of this test"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("takes 3.79, 10.75 and 123.4 ms a token", ["123.4 ms"]),
        ("1,987 tokens a second, 1.41 times stock's", ["1.41 ×"]),
        ("at 97 to 98.7 % of a copy", ["97 %", "98.7 %"]),
        ("tiles of 128 × 128, NVFP4 × bf16", []),
        ("loads 2.40 and 9.99 GB/s", ["9.99 GB/s"]),
        ("takes 9.1\nms, or 9.2\u00a0ms, or 9.3&nbsp;ms, or 9.4\n  ms", ["9.1 ms", "9.2 ms", "9.3 ms", "9.4 ms"]),
        ("takes **9.1** ms, **9.2 ms**, _9.3_ ms, <b>9.4</b> ms", ["9.1 ms", "9.2 ms", "9.3 ms", "9.4 ms"]),
        ("in 9 s, 9 seconds, 9 milliseconds, 8 minutes, 7 h", ["9 s", "9 s", "9 ms", "8 min", "7 h"]),
        ("of 7 KB, 7 MB, 7 GB, 7 GiB and 7 TB", ["7 KB", "7 MB", "7 GB", "7 GiB", "7 TB"]),
        ("at 99 tok/s, 9.1x, 9.2 x, 9-fold, 9 percent", ["99 tokens/s", "9.1 ×", "9.2 ×", "9 ×", "9 %"]),
        ("takes `9.1 ms` or `9.2` ms\n```bash\nlaunch/demo  # 9.3 s\n```", ["9.1 ms", "9.2 ms", "9.3 s"]),
        ("takes 9.1–9.2 ms or 9.3-9.4 ms", ["9.1 ms", "9.2 ms", "9.3 ms", "9.4 ms"]),
        ("| a step, ms | rate (tok/s) |\n| --- | --- |\n| 9.1 | ~99 |", ["9.1 ms", "99 tokens/s"]),
        ("| | ours |\n| --- | --- |\n| first token, ms | 9.1, median |", ["9.1 ms"]),
        ("Times in ms:\n\n| GPUs | ours |\n| --- | --- |\n| 2 | 9.1 |", ["9.1"]),
        ("| step, ms | tokens |\n| --- | --- |\n| 3.79 | 64 |\n\n| a | b |\n| --- | --- |\n| 7 | 8 |", []),
    ],
    ids=[
        *("times", "rates and ratios", "a range", "no figures", "bytes a second", "blanks", "emphasis", "seconds"),
        *(
            "bytes",
            "other units",
            "code",
            "ranges",
            "a unit in a head",
            "a unit in a row's head",
            "a unit above a table",
            "heads of other columns",
        ),
    ],
)
def test_a_figure_without_a_source_would_be_seen(text: str, found: list[str]) -> None:
    data = {(Decimal(value), unit) for value, unit in (("3.79", "ms"), ("10.75", "ms"), ("1987", "tokens/s"))}
    assert unknown("page.md", text, data | {(Decimal("2.4"), "GB/s")}) == found


def not_in_the_notebook(one: Figure, notebook: str) -> bool:
    """Whether no line has the figure and its peer's, perhaps with more digits."""
    lines = [[number(found) for found in re.findall(NUMBER, line)] for line in notebook.splitlines()]
    values = [value for value in (one.value, one.peer_value) if value is not None]
    return not any(all(any(found.quantize(value) == value for found in line) for value in values) for line in lines)


@pytest.mark.parametrize("file", sorted(FIGURES.glob("*.json")), ids=lambda file: file.stem)
def test_a_recorded_figure_is_in_its_notebook(file: Path) -> None:
    those = [one for one in read(file) if one.source.endswith(".md")]
    missing = [one for one in those if not_in_the_notebook(one, (RESULTS / one.source).read_text(encoding="utf-8"))]
    assert not missing, f"{file}: expected on one line of its notebook: {missing}"


@pytest.mark.parametrize(
    ("value", "peer_value"),
    [("3.97", "6.97"), ("3.79", "6.79"), ("3.79", "16.39"), ("3.8", "7")],
    ids=["ours", "the peer's", "the peer's of another row", "rounded"],
)
def test_a_changed_figure_is_not_in_its_notebook(value: str, peer_value: str) -> None:
    at_1 = next(one for one in recorded() if one.case == "flash_tp2" and one.requests == 1)
    changed = replace(at_1, value=Decimal(value), peer_value=Decimal(peer_value))
    notebook = "| 1 | 3.79 | 6.97 |\n| 16 | 10.75 | 16.39 |"
    assert not_in_the_notebook(changed, notebook) == (value != "3.8")


def test_a_table_that_has_no_figure_is_named() -> None:
    with pytest.raises(ValueError, match="figures: nothing.*expected figures of nothing, found none"):
        pages.filled("<!-- figures: nothing -->\n<!-- end of figures -->", ROOT, recorded())


@pytest.mark.parametrize(("cases", "told"), [("flash_tp2", False), ("flash_tp2 flash_tp4", True)])
def test_a_note_names_the_number_of_gpus_where_a_table_has_several(cases: str, told: bool) -> None:
    metric = "time per output token, mean"
    asked = f"<!-- figures: {cases} | {metric} -->\n<!-- end of figures -->"
    notes = [line for line in pages.filled(asked, ROOT, recorded()).splitlines() if line.startswith("* ")]
    assert notes and all(("GPUs" in note.partition(": ")[0]) == told for note in notes)
