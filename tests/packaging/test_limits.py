"""A size that kernels bound is defined once, in ``nvfp4_sgl/limits.py``, and is used by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from nvfp4_sgl import limits
from tests.packaging.checkout import KERNEL_FOLDERS, PACKAGE, ROOT, sources

LIMITS = PACKAGE / "limits.py"
NAMES = sorted(name for name in vars(limits) if name.isupper())
FILES = {file: file.read_text() for top in ("nvfp4_sgl", *KERNEL_FOLDERS) for file in sources(ROOT / top)}
AMBIGUOUS = ("MAX_EXPERTS", "K_MULTIPLE", "MIN_LIMIT", "MAX_LIMIT")
"""Names that do not say what is bounded: experts of a file, of a router or of a GEMM; K of which operands."""


def assigned(source: str) -> Iterator[str]:
    """Names that a module's own lines define."""
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))


DEFINED = {file: set(assigned(source)) for file, source in FILES.items() if file != LIMITS}


def test_there_are_limits() -> None:
    assert len(NAMES) > 20 and set(NAMES) == set(assigned(FILES[LIMITS]))


def test_no_other_file_defines_one() -> None:
    again = {str(file.relative_to(ROOT)): names & {*NAMES, *AMBIGUOUS} for file, names in DEFINED.items()}
    assert not {file: names for file, names in again.items() if names}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_used(name: str) -> None:
    using = [file for file, source in FILES.items() if file != LIMITS and name in source]
    assert using or FILES[LIMITS].count(name) > 1


def test_definitions_are_found() -> None:
    source = "A, B = 1, 2\nC: int = 3\nD = E = 4\n\ndef f():\n    G = 5\n"
    assert set(assigned(source)) == {"A", "B", "C", "D", "E"}
