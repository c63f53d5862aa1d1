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
"""A file and a symbol that it defines, as tables write both."""
PLACED = re.compile(r"((?:`[\w.]+`,? (?:and )?)*`[\w.]+`)\s(?:in|of)\s`([\w./]+/\w+\.py)`")
"""Symbols and the file that defines them, as sentences write both."""
MODULE = re.compile(r"(?<![\w/.-])(?:nvfp4_sgl|triton_kernels|cutedsl_kernels)(?:\.[A-Za-z_]\w*)+")
"""A module, or what it defines, by its dotted name."""
INSIDE = ("cutedsl_kernels", "triton_kernels")
"""Folders that are packages of nvfp4_sgl once it is installed."""


def module_fault(name: str) -> str | None:
    """Why there is no module, package or definition of a dotted name, or ``None``."""
    parts = name.split(".")
    parts = parts[1:] if parts[1] in INSIDE else parts
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        file = next((one for one in (base.with_suffix(".py"), base / "__init__.py") if one.is_file()), None)
        if file is not None:
            rest = ".".join(parts[end:])
            return None if not rest or rest in defined(file) else f"{name}: {file.relative_to(ROOT)} does not define it"
        if base.is_dir() and end == len(parts):
            return None
    return f"{name}: no such module"


def named(text: str) -> list[tuple[str, str]]:
    """(file, symbol) for every pair that ``text`` names."""
    placed = [(match[2], one) for match in PLACED.finditer(text) for one in re.findall(r"`([\w.]+)`", match[1])]
    return [*NAMED.findall(text), *placed]


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
