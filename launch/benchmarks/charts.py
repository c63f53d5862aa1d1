"""The pictures of ``docs/benchmarks.md``: SVG bar charts of figures that ``launch/results`` records, and of no others.

``launch/docs figures`` writes them to ``docs/pictures``; a test holds the committed files against what this module
draws. A picture follows the reader's colour scheme, light or dark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from html import escape
from pathlib import Path

from benchmarks.figures import Figure, recorded

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "launch" / "results"
PICTURES = ROOT / "docs" / "pictures"
STYLE = """<style>
  text { fill: #1f2328 } .note { fill: #59636e } .page { fill: #ffffff }
  .bar0 { fill: #3f7d58 } .bar1 { fill: #b0b0b0 } .bar2 { fill: #c98a3d }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .note { fill: #9198a1 } .page { fill: #0d1117 }
    .bar0 { fill: #5fae7f } .bar1 { fill: #6e7681 } .bar2 { fill: #d9a05b }
  }
</style>"""
LABEL, PLOT, VALUE, BAR, GAP = 230, 420, 90, 16, 14
"""Pixels: width of the labels, of the longest bar and of its value; height of a bar; space between groups."""


@dataclass(frozen=True)
class Chart:
    """Groups of horizontal bars on one scale.

    Attributes:
        title: what is shown, in which unit. note: how the figures are known.
        series: name of each bar of a group. groups: (label, a value for each series, None where it was not measured).
    """

    title: str
    note: str
    series: Sequence[str]
    groups: Sequence[tuple[str, Sequence[Decimal | None]]]


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


def number(cell: str) -> Decimal:
    """The number that a cell begins with: ``4.66 ms``, ``**1.14x**``."""
    return Decimal(cell.strip("* ").split()[0].rstrip("x*%"))


def of(case: str) -> list[Figure]:
    """The latest figures of ``case``; ValueError if there are none."""
    found = [one for one in recorded() if one.case == case]
    if not found:
        raise ValueError(f"launch/results/figures: expected figures of {case}, found none")
    return found


def dates(figures: Sequence[Figure]) -> str:
    """The days on which ``figures`` were measured."""
    return " and ".join(sorted({one.date[:10] for one in figures}))


def flash(tp: int) -> Chart:
    rows = [one for one in of(f"flash_tp{tp}") if one.metric == "time per output token, mean"]
    return Chart(
        f"Flash on {tp} H200s: ms a token (mean), lower is better",
        f"Measured {dates(rows)}, random weights, {rows[0].prompt} tokens in, {rows[0].output} out; stock: FP8 + MXFP4",
        ("nvfp4-sgl", "stock SGLang"),
        [(at(one.requests, "request"), (one.value, one.peer_value)) for one in sorted(rows, key=requests)],
    )


def requests(one: Figure) -> int:
    return one.requests or 0


def at(count: int | None, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def gemms() -> Chart:
    rows = of("gemms")
    peers = ("cuBLAS (bf16 weights)", "humming", "Marlin")
    found = {peer: {one.tokens: one.value for one in rows if f"time of {peer} over" in one.metric} for peer in peers}
    return Chart(
        "Dense NVFP4 GEMMs of Flash on an H200: a library's time over ours, higher is better",
        f"Measured {dates(rows)}; geometric means; Marlin on another day than the others",
        peers,
        [(at(count, "token"), [found[peer].get(count) for peer in peers]) for count in (1, 16, 64, 4096)],
    )


def attention() -> Chart:
    rows = of("attention")
    counts = (1, 64, 8192)
    found = {(one.setting, one.tokens): one.value for one in rows}
    settings = dict.fromkeys(one.setting for one in rows)
    return Chart(
        "Sparse attention on an H200: FlashMLA's time over ours, higher is better",
        f"Measured {dates(rows)}",
        ["1 query", *(f"{count} queries" for count in counts[1:])],
        [(str(setting), [found.get((setting, count)) for count in counts]) for setting in settings],
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
    "flash_tp2": lambda: flash(2),
    "flash_tp4": lambda: flash(4),
    "hopper_gemms": gemms,
    "sparse_attention": attention,
    "sm100_modelled": modelled,
}
"""By the name of their file."""


def draw(chart: Chart) -> str:
    """The chart as an SVG document."""
    longest = max(value for _, values in chart.groups for value in values if value is not None)
    group = BAR * len(chart.series) + GAP
    width, top = LABEL + PLOT + VALUE, 84
    height = top + group * len(chart.groups) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        'font-family="sans-serif" font-size="12">',
        STYLE,
        f'<rect class="page" width="{width}" height="{height}"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(chart.title)}</text>',
        f'<text class="note" x="12" y="43" font-size="11">{escape(chart.note)}</text>',
    ]
    for index, name in enumerate(chart.series):
        x = 12 + index * 170
        parts.append(f'<rect class="bar{index}" x="{x}" y="54" width="12" height="12"/>')
        parts.append(f'<text x="{x + 17}" y="64">{escape(name)}</text>')
    for row, (label, values) in enumerate(chart.groups):
        y = top + row * group
        middle = y + BAR * len(values) / 2 + 4
        parts.append(f'<text x="{LABEL - 8}" y="{middle:g}" text-anchor="end">{escape(label)}</text>')
        for index, value in enumerate(values):
            bar = y + index * BAR
            if value is None:
                parts.append(f'<text class="note" x="{LABEL + 5}" y="{bar + 11}" font-size="11">not measured</text>')
                continue
            length = value / longest * PLOT
            parts.append(f'<rect class="bar{index}" x="{LABEL}" y="{bar}" width="{length:.1f}" height="{BAR - 2}"/>')
            parts.append(f'<text x="{LABEL + length + 5:.1f}" y="{bar + 11}" font-size="11">{value:,}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_all() -> None:
    """Write every picture."""
    PICTURES.mkdir(exist_ok=True)
    for name, chart in CHARTS.items():
        (PICTURES / f"{name}.svg").write_text(draw(chart()), encoding="utf-8")
