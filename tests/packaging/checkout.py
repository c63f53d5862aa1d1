"""Where things lie in this checkout, for tests that read files instead of importing them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "nvfp4_sgl"
KERNEL_FOLDERS = ("triton_kernels", "cutedsl_kernels")


def sources(folder: Path) -> list[Path]:
    """Every Python file under ``folder``."""
    return sorted(folder.rglob("*.py"))


def canonical(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Import:
    """One imported module: dotted ``module``, and how many packages up a relative import goes (0: absolute)."""

    module: str
    level: int
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def imports(source: str) -> Iterator[Import]:
    """Every import in ``source``, those inside functions too; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, 0, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(".".join(part for part in (node.module, alias.name) if part), node.level, node.lineno)
