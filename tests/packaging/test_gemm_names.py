"""Matrices are told apart by the inventory of GEMMs, not by their names: a merge is written once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.packaging.checkout import PACKAGE, sources

NAMES = re.compile(r"(?<!\w)(?:wq_a|wq_b|wkv|wgate|wo_a|wo_b|w1|w2|w3|shared_experts)(?!\w)")
KNOW_NAMES = ("checkpoint", "convert", "synthetic", "weights")
"""Folders of the package that read, write or list the matrices of a checkpoint."""
TESTS_OF_TEXT = {"endswith", "startswith", "removeprefix", "removesuffix", "partition", "rpartition", "find", "split"}


def told_by_name(source: str) -> list[int]:
    """Lines that compare or take apart a text by the name of a matrix."""
    return sorted({line for line, text in _texts(ast.parse(source)) if NAMES.search(text)})


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts, with their lines, that something is compared with, or that a method which tests texts takes."""
    for node in ast.walk(tree):
        found: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            found = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TESTS_OF_TEXT:
            found = node.args
        for one in found:
            for inner in ast.walk(one):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.lineno, inner.value


def test_no_module_tells_matrices_by_their_names() -> None:
    files = [file for file in sources(PACKAGE) if file.relative_to(PACKAGE).parts[0] not in KNOW_NAMES]
    assert len(files) > 100
    found = {str(file.relative_to(PACKAGE)): lines for file in files if (lines := told_by_name(file.read_text()))}
    assert not found, f"ask nvfp4_sgl.weights.gemms for the GEMM of a matrix: {found}"


@pytest.mark.parametrize(
    "source",
    [
        'spec.name.endswith((".w1", ".w3", ".wo_a"))',
        'product.name.startswith("shared_experts.")',
        'name in ("wq_a", "wkv")',
        'name == "indexer.wq_b"',
    ],
)
def test_comparisons_with_names_are_seen(source: str) -> None:
    assert told_by_name(source) == [1]


@pytest.mark.parametrize("source", ['Shard(f"{stem}.wq_a")', 'name == "w10"', 'name.endswith(".attn_sink")'])
def test_other_texts_pass(source: str) -> None:
    assert not told_by_name(source)
