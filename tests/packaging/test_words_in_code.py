"""Docstrings and errors of the four code folders: a first line says what the thing is or does, in the field's words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT, sources
from tests.support import words

FOLDERS = ("cutedsl_kernels", "launch", "nvfp4_sgl", "triton_kernels")
MAX_MEAN_WORDS = 20
"""Words of a sentence of an error."""


def python_files() -> Iterator[Path]:
    linked = ROOT / "launch" / "src" / "nvfp4_sgl"
    for folder in FOLDERS:
        yield from (file for file in sources(ROOT / folder) if linked not in file.parents)


def test_docstrings_and_errors_say_what_things_are() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{fault.line}: {fault.rule}"
        for file in python_files()
        for fault in words.faults(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_errors_are_short_on_average() -> None:
    found = [
        sentence.words
        for file in python_files()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for argument in node.exc.args
        for sentence in words.prose.split([(1, words.literal(argument))])
    ]
    assert len(found) > 300 and sum(found) / len(found) <= MAX_MEAN_WORDS


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('"""It multiplies."""', "first line: expected what the thing is or does, found 'It'"),
        ('"""Multiplies"""', "first line: expected a full stop at the end of its paragraph"),
        ('"""' + "word " * 31 + '."""', "first line: at most 30 words a sentence, found 31"),
        ('def f():\n    """Sum.\n\n    The experts\' products.\n    """', "house word 'products': write GEMM"),
        ("raise ValueError(f'{x}: " + "word " * 30 + "')", "error: at most 30 words a sentence, found 31"),
        ("raise ValueError('dense products are wrong')", "error: house word 'products': write GEMM"),
    ],
    ids=[
        "a first word",
        "no full stop",
        "a long first line",
        "a house word",
        "a long error",
        "a house word in an error",
    ],
)
def test_a_fault_is_found(source: str, rule: str) -> None:
    assert any(fault.rule.startswith(rule) for fault in words.faults(source))


def test_what_is_fine_passes() -> None:
    source = (
        '"""Multiply ``a`` by :func:`product`:\n\nTwo sentences. ' + "word " * 40 + '"""\nraise ValueError("x: " + y)'
    )
    assert not list(words.faults(source))
