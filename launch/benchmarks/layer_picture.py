"""The picture of ``docs/how_it_works.md``: the boundaries of a decode layer, as :meth:`Block.boundaries` lists them.

``python -m benchmarks.layer_picture`` (with ``launch`` on the path) writes it to ``docs/pictures``; a test holds the
committed file against what this module draws. Layers of every kind are built of a tiny checkpoint on the CPU. Names,
order and implementations come from them and from the targets' descriptors; :data:`GIVES` alone is written here. The
picture follows the reader's colour scheme, light or dark.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.layer import Block
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.target import CPU, HOPPER

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "layer.svg"
STYLE = """<style>
  text, polygon { fill: #1f2328 } line { stroke: #444 } rect { stroke: #444 }
  .page { fill: #ffffff; stroke: none } .streams { fill: #dbe7f3 } .site { fill: #f0efe0 } .other { fill: #e3efe6 }
  @media (prefers-color-scheme: dark) {
    text, polygon { fill: #e6edf3 } line, rect { stroke: #9198a1 }
    .page { fill: #0d1117 } .streams { fill: #24384d } .site { fill: #45421f } .other { fill: #23402f }
  }
</style>"""
GIVES: Mapping[str, str] = {
    "hc_attn": "x of attention",
    "attn.project_x": "q_lora, kv, compressor columns",
    "attn.prepare": "q_lora; writes the caches",
    "attn.project_q": "q, index queries",
    "attn.select": "chosen entries",
    "attn.attend": "o, inverse RoPE applied",
    "attn.wo_a": "o_lora of each group",
    "attn.wo_b": "partial sum, then all-reduce",
    "hc_ffn": "x of the experts",
    "ffn.route": "experts and weights",
    "ffn.experts": "partial sum, then all-reduce",
}
"""What each boundary gives."""
SITES = ("hc_attn", "hc_ffn")
ENDS = ("attn.wo_b", "ffn.experts")
"""Boundaries whose output the next site mixes into the streams."""
KINDS = (LayerKind.SWA, LayerKind.HCA, LayerKind.CSA)
BOX, ROW, TOP = 150, 38, 84
"""Pixels: width of a box, height of a row, where the first begins."""
COLUMNS = {"contract": 290, "gives": 440, "kinds": 660, "gpu": 800, "cpu": 985}


@dataclass(frozen=True)
class Row:
    """One boundary.

    Attributes:
        name: as :meth:`Block.boundaries` has it. contract: the field of :class:`Boundaries` that made it.
        kinds: of layers that have it. gpu, cpu: names of the implementations.
    """

    name: str
    contract: str
    kinds: tuple[LayerKind, ...]
    gpu: str
    cpu: str


def rows() -> list[Row]:
    """The boundaries of a layer, in the order in which they run."""
    made: dict[int, str] = {}

    def noted(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def build(*arguments: Any) -> Any:
            module = make(*arguments)
            made[id(module)] = name
            return module

        return build

    given = CPU.boundaries()
    noting: dict[str, Any] = {name: noted(name, getattr(given, name)) for name in given.names()}
    recorded = replace(given, **noting)
    found: dict[LayerKind, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder) / "tiny", "nvfp4-full", seed=0)
        verified = verify(Path(folder) / "tiny")
        context = Context(verified.reader(), verified.config, recorded)
        for layer in verified.config.layers():
            if layer.kind not in found:
                block = Block(context, layer)
                found[layer.kind] = {name: made[id(boundary)] for name, boundary in block.boundaries()}
    gpu, cpu = (
        {name: where.partition(" ")[0].rpartition(":")[2] for name, where in target.boundaries().names().items()}
        for target in (HOPPER, CPU)
    )
    return [
        Row(name, contract, tuple(kind for kind in KINDS if name in found[kind]), gpu[contract], cpu[contract])
        for name, contract in found[LayerKind.CSA].items()
    ]


def draw(layer: Sequence[Row]) -> str:
    """The layer as an SVG document."""
    width, bottom = 1190, TOP + ROW * len(layer)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 46}"',
        'font-family="sans-serif" font-size="12">',
        STYLE,
        f'<rect class="page" width="{width}" height="{bottom + 46}"/>',
        text(12, 24, "A decode layer: its boundaries in the order in which they run", bold=True, size=15),
        text(12, 43, "Drawn from Block.boundaries() and the targets' descriptors", size=11),
        *(text(COLUMNS[name], 70, title, bold=True) for name, title in HEADINGS.items()),
        *(
            text(COLUMNS["kinds"] + 42 * place + 13, 70, kind.name, bold=True, centred=True)
            for place, kind in enumerate(KINDS)
        ),
        f'<rect x="20" y="{TOP - 8}" width="54" height="{ROW * len(layer) + 12}" rx="6" class="streams"/>',
        f'<text x="51" y="{(TOP + bottom) // 2}" text-anchor="middle" '
        f'transform="rotate(-90 51 {(TOP + bottom) // 2})">residual streams</text>',
    ]
    for place, row in enumerate(layer):
        y = TOP + ROW * place
        middle, is_site = y + 13, row.name in SITES
        name = "site" if is_site else "other"
        parts.append(f'<rect class="{name}" x="110" y="{y}" width="{BOX}" height="26" rx="5"/>')
        parts.append(text(120, y + 17, row.name, bold=True))
        if is_site:
            parts.append(arrow(74, middle, 110, middle))
        if row.name in ENDS:
            parts.append(arrow(110, middle, 74, middle))
        if not is_site:
            parts.append(arrow(110 + BOX // 2, y - (ROW - 26), 110 + BOX // 2, y))
        parts.append(text(COLUMNS["contract"], y + 17, row.contract))
        parts.append(text(COLUMNS["gives"], y + 17, GIVES[row.name]))
        for column, kind in enumerate(KINDS):
            mark = "●" if kind in row.kinds else "–"
            parts.append(text(COLUMNS["kinds"] + 42 * column + 13, y + 17, mark, centred=True))
        parts += [text(COLUMNS["gpu"], y + 17, row.gpu), text(COLUMNS["cpu"], y + 17, row.cpu)]
    parts.append(text(20, bottom + 28, "A site mixes the sublayer's output before it into the streams.", size=11))
    return "\n".join([*parts, "</svg>"]) + "\n"


HEADINGS = {"contract": "contract.py", "gives": "gives", "gpu": "Hopper and SM100", "cpu": "CPU"}


def text(x: int, y: int, words: str, *, bold: bool = False, size: int = 12, centred: bool = False) -> str:
    style = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if centred else "")
    return f'<text x="{x}" y="{y}" font-size="{size}"{style}>{escape(words)}</text>'


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    """A line with a head at its end, along an axis."""
    step_x, step_y = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    base_x, base_y = to_x - 6 * step_x, to_y - 6 * step_y
    head = f"{to_x},{to_y} {base_x - 4 * step_y},{base_y - 4 * step_x} {base_x + 4 * step_y},{base_y + 4 * step_x}"
    return f'<line x1="{x}" y1="{y}" x2="{base_x}" y2="{base_y}"/><polygon points="{head}"/>'


def main() -> None:
    argparse.ArgumentParser(prog="layer_picture", description=(__doc__ or "").splitlines()[0]).parse_args()
    PICTURE.write_text(draw(rows()), encoding="utf-8")


if __name__ == "__main__":
    main()
