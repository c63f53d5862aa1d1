"""Whether a file defines a symbol that a page names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.packaging.checkout import ROOT
from tests.support.documents import headings

NAMED = re.compile(r"`([\w./-]+\.(?:py|md))` `([^`]+)`")
"""A file and a symbol that it defines, as pages write both."""


def named(text: str) -> list[tuple[str, str]]:
    """(file, symbol) for every pair that ``text`` names."""
    return NAMED.findall(text)


def fault(file: str, symbol: str) -> str | None:
    """Why ``symbol`` is not in ``file``, or ``None``; a symbol of a page is a heading."""
    path = ROOT / file
    if not path.is_file():
        return f"{file}: no such file"
    if symbol not in (headings(path.read_text("utf-8")) if path.suffix == ".md" else defined(path)):
        return f"{file}: does not define {symbol}"
    return None


@cache
def defined(path: Path) -> frozenset[str]:
    """What a module defines at its top level, and ``Class.name`` for what its classes define."""
    return frozenset(_names(ast.parse(path.read_text("utf-8")).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _names(node.body, f"{prefix}{node.name}.")
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in [node.target] if isinstance(node, ast.AnnAssign) else targets:
            yield from (prefix + one.id for one in ast.walk(target) if isinstance(one, ast.Name))
