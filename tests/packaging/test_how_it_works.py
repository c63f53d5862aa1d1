"""docs/how_it_works.md: its picture, figures, targets and symbols are those of the code and of recorded results."""

from __future__ import annotations

import re
import sys

import pytest

from nvfp4_sgl.targets.target import TARGETS, Descriptor
from tests.packaging.checkout import ROOT
from tests.support.definitions import fault, named
from tests.support.documents import FENCE, table

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
from benchmarks import charts, layer_picture

PAGE = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
LAUNCHES = table(PAGE, "launches")
IN_A_STEP = {
    "hyper-connections": "hyper-connections",
    "inputs of attention": "inputs of attention",
    "scores": "selection, scores",
    "selection": "selection, scores",
    "sparse attention": "sparse attention",
    "all-reduce": "all-reduce (SGLang's one-shot)",
    "router's logits": "router's logits; with index weights",
    "routing": "routing",
    "GEMM, gate and up, SwiGLU": "experts, gate and up",
    "GEMM, down": "experts, down",
    "weighted sum": "the experts' weighted sum",
}
"""Rows of the traced step in flash_tp2_h200.md, by launch."""
DENSE = {
    "attn.project_x": "wq_a + wkv + compressor + indexer compressor",
    "attn.project_q": "wq_b + indexer.wq_b",
    "attn.wo_a": "wo_a",
    "attn.wo_b": "wo_b",
}
"""Rows of dense GEMMs in hopper_marlin_h200.md, by boundary."""


def test_the_picture_is_drawn_from_the_code() -> None:
    drawn = layer_picture.draw(layer_picture.rows())
    found = layer_picture.PICTURE.read_text(encoding="utf-8")
    assert found == drawn, "draw it again: cd launch && python -m benchmarks.layer_picture"


def test_launches_of_a_layer_take_what_is_recorded() -> None:
    step = {row["adds to a step, µs"]: row for row in charts.table("flash_tp2_h200.md", "adds to a step, µs")}
    gemms = [charts.cells(line) for line in (charts.RESULTS / "hopper_marlin_h200.md").read_text("utf-8").splitlines()]
    assert len(LAUNCHES) == 17
    for boundary, launch, _, _, *times in LAUNCHES:
        recorded = step.get(IN_A_STEP.get(launch, ""))
        each = ["", ""] if recorded is None else [recorded[f"at {n}: each"].split(":")[0] for n in (1, 64)]
        assert times[:2] == each, launch
        for tokens, alone in zip(("1", "64"), times[2:], strict=True):
            if boundary in DENSE:
                size = launch.removeprefix("GEMM ")
                assert any(row[:3] == [DENSE[boundary], size, tokens] and row[4] == alone for row in gemms), launch
    (gate_up,), (down,) = (
        [row for row in LAUNCHES if row[1] == f"GEMM, {name}"] for name in ("gate and up, SwiGLU", "down")
    )
    for place, tokens in enumerate(("1", "64")):
        expected = [gate_up[2 + place], gate_up[6 + place], down[6 + place]]
        assert any(row[:2] == ["2", tokens] and row[4:7] == expected for row in gemms)


def shown(target: Descriptor, field: str) -> str:
    """A field of a target as the page shows it."""
    value = getattr(target, field)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field == "modes":
        return ", ".join(mode.value for mode in value)
    if field == "capabilities":
        return ", ".join(f"{major}.{minor}" for major, minor in value)
    return str(value).rpartition(":")[2]


def test_targets_differ_as_their_descriptors_say() -> None:
    rows = table(PAGE, "targets")
    assert rows and f"| field | {' | '.join(target.name for target in TARGETS)} |" in PAGE
    for name, *cells in rows:
        field = name.strip("`")
        assert cells == [shown(target, field) for target in TARGETS], field


@pytest.mark.parametrize(("file", "symbol"), named(PAGE), ids=str)
def test_a_symbol_is_where_the_page_says(file: str, symbol: str) -> None:
    assert fault(file, symbol) is None


def test_sentences_are_short() -> None:
    prose = "\n".join(line for line in FENCE.sub("", PAGE).splitlines() if not line.startswith(("|", "#", "!", "<!--")))
    sentences = [" ".join(each.split()) for each in re.split(r"(?<=[.:])\s+|\n\n|\n(?=[*\d])", prose)]
    lengths = {sentence: len(sentence.split()) for sentence in sentences if sentence}
    assert max(lengths.values()) <= 30, max(lengths, key=lambda sentence: lengths[sentence])
    assert sum(lengths.values()) <= 20 * len(lengths)
