"""Measured figures of user pages: tables are filled from launch/results/figures, and prose says what these say."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT
from tests.support.documents import FENCE
from tests.support.prose import FIGURES, NUMBER, UNITS

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
from benchmarks import pages
from benchmarks.figures import Figure, recorded

NOT_USER_PAGES = ("specification.md", "formats.md")
DISK = "disk that the environment takes"
FORECAST = "bytes of a rank, counted from config.json"
GOAL = "a goal"
LIMIT = "a limit of the server"
NOT_MEASURED: dict[str, dict[str, str]] = {
    "README.md": {"11 GB": DISK},
    "benchmarks.md": {
        **dict.fromkeys(("10 ms", "25 ms", "3.5 ms", "12.5 ms", "2 GB/s", "1.2 ×"), GOAL),
        "24 GB": "size of the files that a benchmark makes",
    },
    "checkpoints.md": {"320 MiB": "size of a buffer"},
    "contributing.md": {"11 GB": DISK},
    "convert.md": dict.fromkeys(("5 GB", "256 MiB"), "a limit of a file's size"),
    "cookbook.md": dict.fromkeys(("161.7 GB", "81.2 GB", "41.0 GB"), FORECAST),
    "find_the_op.md": {"18 %": "the error of an estimator"},
    "first_light.md": {"11 GB": DISK},
    "index.md": {"11 GB": DISK},
    "hopper.md": {"24 GB": "size of the files that a benchmark makes"},
    "security.md": dict.fromkeys(("32 MiB", "128 MiB", "768 MiB", "48 MiB", "512 MiB", "8 GB"), LIMIT),
    "sm100.md": {**dict.fromkeys(("0.3 %", "12 %"), "a bound of a test"), "18.5 MiB": "size of a workspace"},
}
"""By page: figures in prose that nobody measured, and what they are."""


def prose(text: str) -> str:
    """A page without its filled tables, its code and its links' addresses."""
    for pattern in (pages.BLOCK, FENCE, re.compile(r"`[^`]+`"), re.compile(r"\]\([^)]*\)")):
        text = pattern.sub(" ", text)
    return text


def said(text: str) -> Iterator[tuple[Decimal, str]]:
    """(number, unit) of each figure in prose."""
    for match in FIGURES.finditer(text):
        unit = next(unit for pattern, unit in UNITS.items() if re.fullmatch(pattern, match["unit"]))
        for number in re.findall(NUMBER, match["numbers"]):
            yield Decimal(number.rstrip(",").replace(",", "")), unit


def held(figures: list[Figure]) -> set[tuple[Decimal, str]]:
    """What the data hold: values, peers' values and ratios, both ways, to two decimals."""
    found = set()
    for one in figures:
        found.add((one.value, one.unit))
        if one.peer_value is not None and one.ratio is not None:
            found.add((one.peer_value, one.unit))
            found |= {(ratio.quantize(Decimal("0.01"), ROUND_HALF_UP), "×") for ratio in (one.ratio, 1 / one.ratio)}
    return found


def unknown(page: str, text: str, data: set[tuple[Decimal, str]]) -> list[str]:
    return [
        f"{number} {unit}"
        for number, unit in said(prose(text))
        if (number, unit) not in data and f"{number} {unit}" not in NOT_MEASURED.get(page, {})
    ]


def user_pages() -> list[Path]:
    return [page for page in pages.pages() if page.name not in NOT_USER_PAGES]


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_tables_of_a_page_are_what_the_data_give(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.filled(text, page.parent, recorded()) == text, "fill it again: launch/docs figures"


@pytest.mark.parametrize("page", user_pages(), ids=lambda page: page.name)
def test_a_user_page_says_no_figure_that_the_data_do_not_hold(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not unknown(page.name, text, held(recorded())), (
        f"docs/{page.name} has figures without a source: record what was measured in launch/results (a notebook, and"
        " launch/results/figures), or list what was not measured in NOT_MEASURED of this test"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("takes 3.79, 10.75 and 123.4 ms a token", ["123.4 ms"]),
        ("1,987 tokens a second, 1.41 times stock's", ["1.41 ×"]),
        ("at 97 to 98.7 % of a copy", ["97 %", "98.7 %"]),
        ("tiles of 128 × 128, NVFP4 × bf16, and `99 ms` in code", []),
        ("loads 2.40 and 9.99 GB/s", ["9.99 GB/s"]),
    ],
    ids=["times", "rates and ratios", "a range", "no figures", "bytes a second"],
)
def test_a_figure_without_a_source_would_be_seen(text: str, found: list[str]) -> None:
    data = {(Decimal(value), unit) for value, unit in (("3.79", "ms"), ("10.75", "ms"), ("1987", "tokens/s"))}
    assert unknown("page.md", text, data | {(Decimal("2.4"), "GB/s")}) == found


def test_a_table_that_has_no_figure_is_named() -> None:
    with pytest.raises(ValueError, match="figures: nothing.*expected figures of nothing, found none"):
        pages.filled("<!-- figures: nothing -->\n<!-- end of figures -->", ROOT, recorded())
