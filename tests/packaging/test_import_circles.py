"""No module of the package imports itself by a detour, be it by an import inside a function."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.packaging.checkout import KERNEL_FOLDERS, PACKAGE, ROOT, sources


def modules() -> dict[str, Path]:
    """Dotted name to file, kernel folders by their names in the package."""
    files = [(file, file.relative_to(ROOT)) for file in sources(PACKAGE)]
    for folder in KERNEL_FOLDERS:
        files += [(file, Path("nvfp4_sgl") / file.relative_to(ROOT)) for file in sources(ROOT / folder)]
    return {".".join(place.with_suffix("").parts).removesuffix(".__init__"): file for file, place in files}


def run_imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Imports that can run, and whether that is inside a function; those for type checkers alone are left out."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, inside
        children: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            children = node.orelse
        inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in children:
            yield from visit(child, inside)

    yield from visit(tree, False)


def imported(name: str, is_package: bool, source: str, known: set[str]) -> set[str]:
    """Modules of ``known`` that module ``name`` imports, when it is imported or later."""
    package = name.split(".") if is_package else name.split(".")[:-1]
    found: set[str] = set()
    for node, _ in run_imports(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{stem}.{alias.name}" for alias in node.names}
            # A submodule is imported itself; any other name is the module's, or its package's.
            found |= {each if each in known else stem for each in names}
    return found & known - {name}


def graph(files: dict[str, Path]) -> dict[str, set[str]]:
    return {
        name: imported(name, file.name == "__init__.py", file.read_text(), set(files)) for name, file in files.items()
    }


def test_no_circles() -> None:
    found = graph(modules())
    assert len(found) > 100 and sum(map(len, found.values())) > 300
    try:
        TopologicalSorter(found).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


@pytest.mark.parametrize(
    ("name", "is_package", "source", "expected"),
    [
        ("p.a", False, "from p import b", {"p.b"}),
        ("p.a", False, "from p.b import thing", {"p.b"}),
        ("p.a", False, "from . import b", {"p.b"}),
        ("p", True, "from .b import thing", {"p.b"}),
        ("p.a", False, "def f():\n    import p.b", {"p.b"}),
        ("p.a", False, "if TYPE_CHECKING:\n    import p.b", set()),
        ("p.a", False, "if TYPE_CHECKING:\n    pass\nelse:\n    import p.b", {"p.b"}),
        ("p.a", False, "try:\n    import p.b\nexcept ImportError:\n    pass", {"p.b"}),
        ("p.a", False, "class C:\n    import p.b", {"p.b"}),
    ],
)
def test_imports_are_read(name: str, is_package: bool, source: str, expected: set[str]) -> None:
    assert imported(name, is_package, source, {"p", "p.a", "p.b"}) - {"p"} == expected
