"""docs/troubleshooting.md: every error that it quotes is one that the source can print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.packaging.checkout import KERNEL_FOLDERS, PACKAGE, ROOT, sources

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
VARIES = "…"


def templates(source: str) -> Iterator[str]:
    """String literals of Python source, adjacent ones joined, with :data:`VARIES` for each value put into them."""
    inner: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inner.update(node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VARIES for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            yield node.value


@cache
def printable() -> tuple[str, ...]:
    """What the package, its kernels and the scripts can print."""
    files = [file for folder in (PACKAGE, *(ROOT / name for name in KERNEL_FOLDERS)) for file in sources(folder)]
    texts = [text for file in files for text in templates(file.read_text(encoding="utf-8"))]
    scripts = [file for file in (ROOT / "launch").iterdir() if file.is_file() and file.suffix == ""]
    return (*texts, *(line for file in scripts for line in file.read_text(encoding="utf-8").splitlines()))


def occurs(quoted: str, texts: tuple[str, ...]) -> bool:
    pattern = re.compile(".+".join(re.escape(part.strip()) for part in quoted.split(VARIES)), re.DOTALL)
    return any(pattern.search(text) for text in texts)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_error_is_in_the_source(quoted: str) -> None:
    assert occurs(quoted, printable()), "reworded or gone: correct docs/troubleshooting.md"


def test_a_reworded_error_would_be_seen() -> None:
    source = 'raise E(f"{path}: expected one of {names}, found " f"{name}; remove it")'
    texts = tuple(templates(source))
    assert occurs("expected one of …, found …; remove it", texts)
    assert not occurs("expected one of …, found …; delete it", texts)
    assert not occurs("found …, expected one of …", texts)


def test_each_has_a_cause_and_a_remedy() -> None:
    assert len(QUOTED) > 40 and len(set(QUOTED)) == len(QUOTED)
    for part in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]:
        text = part.partition("\n")[2].partition("\n## ")[0].strip()
        assert len(text) > 20, f"nothing said of {part.splitlines()[0]}"


def test_the_first_word_of_our_errors_is_the_documented_one() -> None:
    assert "`nvfp4-sgl: error:`" in PAGE
    for file in ("cli.py", "process_exit.py"):
        assert "nvfp4-sgl: error: " in (Path(PACKAGE) / file).read_text()
