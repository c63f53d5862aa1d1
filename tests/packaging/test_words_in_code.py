"""Docstrings, messages and comments of the four code folders: what a thing is or does, in the field's words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT, sources
from tests.support import words

FOLDERS = ("cutedsl_kernels", "launch", "nvfp4_sgl", "triton_kernels")
MAX_MEAN_WORDS = 20
"""Words of a sentence of an error."""
NO_MESSAGES = ("nvfp4_sgl/synthetic/tokenizer.py",)
"""Files with other texts: what the tokenizer of tiny checkpoints learns from."""


def python_files() -> Iterator[Path]:
    linked = ROOT / "launch" / "src" / "nvfp4_sgl"
    for folder in FOLDERS:
        yield from (file for file in sources(ROOT / folder) if linked not in file.parents)


@cache
def read() -> tuple[list[str], list[int]]:
    """Faults of all files, and the lengths of their errors' sentences: each file is parsed once."""
    found, lengths = [], []
    for file in python_files():
        name, source = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        for fault in words.faults(source, tree):
            if not (name in NO_MESSAGES and fault.rule.startswith("message")):
                found.append(f"{name}:{fault.line}: {fault.rule}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = map(words.literal, node.exc.args)
                lengths += [sentence.words for text in texts for sentence in words.prose.split([(1, text)])]
    return found, lengths


def test_docstrings_and_messages_say_what_things_are() -> None:
    found, _ = read()
    assert not found, "\n".join(found)


def test_errors_are_short_on_average() -> None:
    _, lengths = read()
    assert len(lengths) > 300 and sum(lengths) / len(lengths) <= MAX_MEAN_WORDS


LONG = "message: at most 30 words a sentence, found 31"


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ('"""It multiplies."""', "first line: expected what the thing is or does, found 'It'"),
        ('"""Multiplies"""', "first line: expected a full stop at the end of its paragraph"),
        ('"""' + "word " * 31 + '."""', "first line: at most 30 words a sentence, found 31"),
        ('def f():\n    """Sum.\n\n    The experts\' products.\n    """', "house word 'products': write GEMM"),
        ("raise ValueError(f'{x}: " + "word " * 30 + "')", "message: at most 30 words a sentence, found 31"),
        ("raise ValueError('dense products are wrong')", "message: house word 'products': write GEMM"),
        ('"""How a row is packed."""', "first line: expected what the thing is or does, found 'How'"),
        ('class A:\n    """What a row holds."""', "first line: expected what the thing is or does, found 'What'"),
        ('def f():\n    """Sum.\n\n    In 3 ms, 4 ms or 5 ms.\n    """', "at most 2 figures a sentence, found 3"),
        ('A = 3\n"""In 3 ms, 4 ms or 5 ms."""', "at most 2 figures a sentence, found 3"),
        ('A = 3\n"""The narrow side."""', "house word 'narrow side'"),
        ("A = 3  # the experts' products", "house word 'products'"),
        ("# the narrow\n# side\nA = 3", "house word 'narrow side'"),
        ("message = 'Dense Products are wrong'\nraise ValueError(message)", "message: house word 'Products'"),
        (f"raise ValueError(message='{'word ' * 31}')", LONG),
        (f"raise ValueError('{'word ' * 20}' + f'{{x}}, ' + '{'word ' * 10}')", LONG),
        (f"raise ValueError('%s {'word ' * 30}' % x)", LONG),
        (f"parser.error(f'{{x}} {'word ' * 30}')", LONG),
        (f"logger.warning('%s {'word ' * 30}', x)", LONG),
        (f"explain = {{'a': ['{'word ' * 31}']}}", LONG),
    ],
    ids=[
        *("a first word", "no full stop", "a long first line", "a house word", "a long error"),
        *("a house word in an error", "a question", "a question of a class", "figures", "figures behind a constant"),
        *("a house word behind a constant", "a comment", "a comment of two lines", "a variable", "a keyword"),
        *("added parts", "a filled in text", "an argument parser", "the log", "a text in a table"),
    ],
)
def test_a_fault_is_found(source: str, rule: str) -> None:
    assert any(fault.rule.startswith(rule) for fault in words.faults(source))


@pytest.mark.parametrize(
    "source",
    [
        '"""Multiply ``a`` by :func:`product`:\n\nTwo sentences. ' + "word " * 40 + '"""',
        'raise ValueError("x: " + y)\nA = "products"  # of numbers',
        'def f():\n    """Pack a row::\n\n        3 ms | 4 ms | 5 ms\n\n    Done.\n    """',
        f"HEADER = '| {'word | ' * 40}'",
    ],
    ids=["literals", "a number's product", "a literal block", "a table"],
)
def test_what_is_fine_passes(source: str) -> None:
    assert not list(words.faults(source))
