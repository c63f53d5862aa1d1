"""The report of ``nvfp4-sgl verify`` as one HTML file: tables, and errors by layer and class as SVG. No script, no
network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from html import escape

from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.checkpoint.findings import Finding
from nvfp4_sgl.files import escaped
from nvfp4_sgl.reports.compare import Compared, Comparison
from nvfp4_sgl.reports.verification import Verification

SHOWN_FINDINGS, SHOWN_MATRICES = 200, 20
"""Rows of the longer tables."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 440, 150, 44, 22, 8
"""Pixels of a plot; the last three are margins for its axes."""

_STYLE = """
:root { color-scheme: light dark; --line: #2563a8; --range: #2563a844; --limit: #c0392b; --faint: #8886; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; } figure { margin: 0; } figcaption { font-weight: 600; }
svg { font-size: 11px; } text { fill: currentColor; } .wrong { color: var(--limit); } td.text { text-align: left; }
code { overflow-wrap: anywhere; }
"""


def page(found: Verification) -> str:
    """The whole report."""
    wrong = ' class="wrong"' if found.problems else ""
    body = [f"<h1>{_text(found.directory)}</h1>", f"<p{wrong}><strong>{_text(found.verdict())}</strong></p>"]
    if found.problems:
        body += ["<h2>Problems</h2>", _findings(found.problems)]
    if found.inspection is not None and found.inspection.notes:
        body += ["<h2>Notes</h2>", _findings(found.inspection.notes)]
    if found.comparison is not None:
        body += _comparison(found, found.comparison)
    if found.inspection is not None:
        body += ["<h2>Contents</h2>", f"<pre>{_text(chr(10).join(found.inspection.lines()[:-1]))}</pre>"]
    title = f"<title>{_text(found.directory.name)}: nvfp4-sgl verify</title>"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8">{title}<style>{_STYLE}</style>'
    return "\n".join([head, *body, "</html>"]) + "\n"


def _comparison(found: Verification, comparison: Comparison) -> list[str]:
    limits = comparison.thresholds
    worst = sorted(comparison.matrices, key=lambda matrix: matrix.rms, reverse=True)[:SHOWN_MATRICES]
    rows = [("matrix", "storage", "rms", "cosine", "block", "at row, column")]
    for m in worst:
        numbers = (f"{m.rms:.4f}", f"{m.cosine:.5f}", f"{m.worst.error:.3f}", f"{m.worst.row}, {m.worst.column}")
        rows.append((m.stem, f"{m.source_storage.value} → {m.storage.value}", *numbers))
    return [
        f"<h2>Compared with {_text(found.source)}</h2>",
        "<p>Relative RMS error (median, largest), smallest cosine, and the largest error in a block of 16 relative to"
        f" its largest value. Accepted where storages lose something: {limits.rms:g} and {limits.block:g}.</p>",
        _table(found.class_rows()),
        "<h2>Relative RMS error by layer</h2>",
        "<p>Line: median of a layer's matrices; band: smallest to largest; dashed: what is accepted.</p>",
        *_plots(comparison, "rms", limits.rms),
        "<h2>Largest error in a block by layer</h2>",
        *_plots(comparison, "block", limits.block),
        f"<h2>The {len(worst)} matrices with the largest error</h2>",
        _table(rows),
    ]


def _plots(comparison: Comparison, what: str, limit: float) -> list[str]:
    """A plot for each class of matrix, all with the same axes."""

    def value(matrix: Compared) -> float:
        number = matrix.rms if what == "rms" else matrix.worst.error
        return number if math.isfinite(number) else 2 * limit

    layers = max((matrix.layer for matrix in comparison.matrices), default=0)
    top = 1.1 * max((limit, *map(value, comparison.matrices)))
    plots = ['<div class="plots">']
    for kind in MatrixClass:
        by_layer: dict[int, list[float]] = {}
        for matrix in comparison.matrices:
            if matrix.matrix_class is kind:
                by_layer.setdefault(matrix.layer, []).append(value(matrix))
        if by_layer:
            plots.append(_plot(f"{what}-{kind.value}", kind.value, by_layer, layers, limit, top))
    return [*plots, "</div>"]


def _plot(name: str, title: str, by_layer: dict[int, list[float]], layers: int, limit: float, top: float) -> str:
    """Median and range of each layer's values, over layers 0 to ``layers`` and from 0 to ``top``."""

    def x(layer: int) -> float:
        return LEFT + (WIDTH - LEFT - 10) * (layer / layers if layers else 0.5)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top

    points = [(layer, min(found), statistics.median(found), max(found)) for layer, found in sorted(by_layer.items())]
    ranges = "".join(
        f'<line x1="{x(layer):.1f}" x2="{x(layer):.1f}" y1="{y(low) + 1:.1f}" y2="{y(high) - 1:.1f}"/>'
        for layer, low, _, high in points
    )
    middle = " ".join(f"{x(layer):.1f},{y(median):.1f}" for layer, _, median, _ in points)
    dots = "".join(
        f'<circle cx="{x(layer):.1f}" cy="{y(median):.1f}" r="2.2"><title>layer {layer}: {low:.4g} to {high:.4g},'
        f" median {median:.4g}</title></circle>"
        for layer, low, median, high in points
    )
    ticks = "".join(
        f'<text x="{LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        for value in (0.0, limit, *([top / 1.1] if top > 1.5 * limit else []))
    )
    labels = "".join(
        f'<text x="{x(layer):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{layer}</text>'
        for layer in {0, layers // 2, layers}
    )
    right, floor = WIDTH - 10, HEIGHT - BOTTOM
    return (
        f'<figure id="{name}"><figcaption>{title}</figcaption>'
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{title} by layer">'
        f'<g stroke="var(--range)" stroke-width="5">{ranges}</g>'
        f'<polyline points="{middle}" fill="none" stroke="var(--line)" stroke-width="1.5"/>'
        f'<g fill="var(--line)">{dots}</g>'
        f'<line x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}" stroke="var(--faint)"/>'
        f'<line x1="{LEFT}" x2="{right}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" stroke="var(--limit)"'
        f' stroke-dasharray="4 3"/>{ticks}{labels}</svg></figure>'
    )


def _findings(findings: Sequence[Finding]) -> str:
    rows = [(finding.tensor or "", finding.kind, finding.message) for finding in findings[:SHOWN_FINDINGS]]
    more = f"<p>and {len(findings) - SHOWN_FINDINGS} more</p>" if len(findings) > SHOWN_FINDINGS else ""
    return _table([("tensor", "kind", "what"), *rows], of_text=True) + more


def _table(rows: Iterable[Sequence[str]], *, of_text: bool = False) -> str:
    head, *others = rows
    cell = '<td class="text">' if of_text else "<td>"
    lines = ["<tr>" + "".join(f"<th>{_text(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"{cell}{_text(value)}</td>" for value in row) + "</tr>" for row in others]
    return "<table>" + "\n".join(lines) + "</table>"


def _text(value: object) -> str:
    """Escaped for HTML; control characters spelt out."""
    return escape(escaped(str(value)))
