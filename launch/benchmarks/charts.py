"""The pictures of ``docs/benchmarks.md``: SVG bar charts of figures that ``launch/results`` records, and of no others.

``python -m benchmarks.charts`` (with ``launch`` on the path) writes them to ``docs/pictures``; a test holds the
committed files against what this module draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "launch" / "results"
PICTURES = ROOT / "docs" / "pictures"
COLORS = ("#3f7d58", "#b0b0b0", "#c98a3d")
LABEL, PLOT, VALUE, BAR, GAP = 230, 420, 90, 16, 14
"""Pixels: width of the labels, of the longest bar and of its value; height of a bar; space between groups."""


@dataclass(frozen=True)
class Chart:
    """Groups of horizontal bars on one scale.

    Attributes:
        title: what is shown, in which unit. note: how the figures are known.
        series: name of each bar of a group. groups: (label, a value for each series).
    """

    title: str
    note: str
    series: Sequence[str]
    groups: Sequence[tuple[str, Sequence[float]]]


def table(file: str, first_header: str) -> list[dict[str, str]]:
    """Rows of the first Markdown table in a result whose header begins with ``first_header``, by column.

    Columns of one name are numbered from the second on: ``goal``, ``goal 2``.

    Raises:
        ValueError: the file has no such table.
    """
    lines = (RESULTS / file).read_text(encoding="utf-8").splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith(f"| {first_header} ")), None)
    if start is None:
        raise ValueError(f"launch/results/{file}: expected a table that begins with '{first_header}', found none")
    names: list[str] = []
    for name in cells(lines[start]):
        same = sum(other.partition(" #")[0] == name for other in names)
        names.append(f"{name} #{same + 1}" if same else name)
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(names, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def number(cell: str) -> float:
    """The number that a cell begins with: ``4.66 ms``, ``**1.14x**``."""
    return float(cell.strip("* ").split()[0].rstrip("x*%"))


def flash() -> Chart:
    rows = table("flash_tp2_h200.md", "requests at once")
    return Chart(
        "Flash on two H200s: ms a token (mean TPOT), lower is better",
        "Measured 2026-11-26, one run, random weights, 1024 in, 256 out; stock: FP8 + MXFP4, its median at 16",
        ("nvfp4-sgl", "stock SGLang"),
        [(f"{row['requests at once']} at once", (number(row["TPOT, mean"]), number(row["stock"]))) for row in rows],
    )


def gemms() -> Chart:
    rows = table("hopper_shapes_h200.md", "groups × features × K")[:15]
    return Chart(
        "Hopper's dense GEMMs, Flash on one GPU: µs, lower is better",
        "Measured 2026-11-22 on an H200; cuBLAS multiplies bf16 weights in the same run",
        ("NVFP4 weights", "cuBLAS, bf16 weights"),
        [
            (
                f"{row['groups × features × K']}, {row['tokens']} tok.",
                (number(row["µs"]), number(row["cuBLAS bf16, µs"])),
            )
            for row in rows
        ],
    )


def attention() -> Chart:
    rows = table("triton_h200.md", "heads, keys")
    queries = ("1 query", "64", "8192")
    return Chart(
        "Sparse attention: FlashMLA's time over ours, higher is better",
        "Measured 2026-11-21 and 22 on an H200; 0: not measured",
        queries,
        [
            (f"{row['heads, keys']} (heads, keys)", [number(row[one]) if row[one] else 0.0 for one in queries])
            for row in rows
        ],
    )


def modelled() -> Chart:
    rows = [row for row in table("sm100_modelled.md", "model") if row["tokens"] == "1"]
    return Chart(
        "SM100: all GEMMs of a decode step of one token, µs: MODELLED, never measured",
        "By cutedsl_kernels/sm100/cost.py; the floor is bytes over 7.2 TB/s or operations over 9 PFLOP/s",
        ("modelled", "floor"),
        [
            (
                f"{row['model']}, TP {row['ranks']}",
                (number(row["modelled us"]), number(row["floor us"])),
            )
            for row in rows
        ],
    )


CHARTS: Mapping[str, Callable[[], Chart]] = {
    "flash_tp2": flash,
    "hopper_gemms": gemms,
    "sparse_attention": attention,
    "sm100_modelled": modelled,
}
"""By the name of their file."""


def draw(chart: Chart) -> str:
    """The chart as an SVG document."""
    longest = max(value for _, values in chart.groups for value in values)
    group = BAR * len(chart.series) + GAP
    width, top = LABEL + PLOT + VALUE, 84
    height = top + group * len(chart.groups) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(chart.title)}</text>',
        f'<text x="12" y="43" font-size="11" fill="#555555">{escape(chart.note)}</text>',
    ]
    for index, name in enumerate(chart.series):
        x = 12 + index * 170
        parts.append(f'<rect x="{x}" y="54" width="12" height="12" fill="{COLORS[index]}"/>')
        parts.append(f'<text x="{x + 17}" y="64">{escape(name)}</text>')
    for row, (label, values) in enumerate(chart.groups):
        y = top + row * group
        middle = y + BAR * len(values) / 2 + 4
        parts.append(f'<text x="{LABEL - 8}" y="{middle:g}" text-anchor="end">{escape(label)}</text>')
        for index, value in enumerate(values):
            length, bar = value / longest * PLOT, y + index * BAR
            parts.append(
                f'<rect x="{LABEL}" y="{bar}" width="{length:.1f}" height="{BAR - 2}" fill="{COLORS[index]}"/>'
            )
            parts.append(f'<text x="{LABEL + length + 5:.1f}" y="{bar + 11}" font-size="11">{value:g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    argparse.ArgumentParser(prog="charts", description=(__doc__ or "").splitlines()[0]).parse_args()
    PICTURES.mkdir(exist_ok=True)
    for name, chart in CHARTS.items():
        (PICTURES / f"{name}.svg").write_text(draw(chart()), encoding="utf-8")


if __name__ == "__main__":
    main()
