"""What differs by a layer's compress ratio is asked of its record, not told from the number."""

from __future__ import annotations

import ast

import pytest

from tests.packaging.checkout import PACKAGE, ROOT, sources

RATIOS = {0, 4, 128}
RECORD = PACKAGE / "config.py"
"""Where the record is; kernels know the ratios that they are made for."""


def compared(source: str) -> list[str]:
    """Comparisons of a ratio, or of several, with a number or with a list that has one."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and any(_is_ratio(side) for side in (node.left, *node.comparators))
        and any(_has_number(side) for side in (node.left, *node.comparators))
    ]


def _is_ratio(side: ast.expr) -> bool:
    name = side.attr if isinstance(side, ast.Attribute) else side.id if isinstance(side, ast.Name) else ""
    return name.lower().endswith(("ratio", "ratios"))


def _has_number(side: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Constant) and type(node.value) is int and node.value in RATIOS for node in ast.walk(side)
    )


@pytest.mark.parametrize("folder", ["nvfp4_sgl", "launch"])
def test_no_ratio_is_compared_with_a_number(folder: str) -> None:
    files = [file for file in sources(ROOT / folder) if file != RECORD]
    assert files
    found = {str(file.relative_to(ROOT)): compared(file.read_text()) for file in files}
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    ["ratio == 4", "layer.ratio in (4, 128)", "128 in ratios", "if spec.compress_ratio != 0: pass", "0 < RATIO"],
)
def test_a_comparison_is_seen(source: str) -> None:
    assert compared(source)


@pytest.mark.parametrize(
    "source", ["ratio == LayerKind.CSA.value", "count // ratio == 4", "layer.selects", "swa_ratio > 0.5"]
)
def test_others_are_not(source: str) -> None:
    assert not compared(source)
