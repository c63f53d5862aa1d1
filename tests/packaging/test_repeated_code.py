"""No code is written twice: no run of lines and no function stands in two places of the three code folders."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest

from tests.packaging.checkout import KERNEL_FOLDERS, ROOT, sources

RUN = 10
"""Lines of code that no two places share. Imports, docstrings, comments and blank lines are left out."""
FUNCTION = 4
"""Lines of a function, parameters included, that stands in one place."""


def code_lines(source: str) -> list[tuple[int, str]]:
    """Number and text of each line of code, without indentation."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and type(node.value.value) is str
        if isinstance(node, ast.stmt) and (is_text or isinstance(node, ast.Import | ast.ImportFrom)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1) if number not in left_out)
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def repeated(files: Mapping[str, str]) -> list[str]:
    """Where each run begins that has been seen before, and where it was seen."""
    first: dict[int, tuple[str, int]] = {}
    found = []
    for name, source in files.items():
        lines = code_lines(source)
        inside = False
        for at in range(len(lines) - RUN + 1):
            run = hash(tuple(line for _, line in lines[at : at + RUN]))
            seen = first.setdefault(run, (name, at))
            was_inside, inside = inside, seen != (name, at)
            if inside and not was_inside:
                number = code_lines(files[seen[0]])[seen[1]][0]
                found.append(f"{name}:{lines[at][0]} repeats {seen[0]}:{number}")
    return found


def functions(source: str) -> list[tuple[int, str]]:
    """Number and code of each function of :data:`FUNCTION` lines or more, without its name and docstring."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            code = node.body[ast.get_docstring(node) is not None :]
            text = "\n".join(map(ast.unparse, (node.args, *code)))
            if len(text.splitlines()) >= FUNCTION:
                found.append((node.lineno, text))
    return found


def functions_again(files: Mapping[str, str]) -> list[str]:
    """Functions that have been seen before, and where, whatever they are called."""
    first: dict[str, str] = {}
    found = []
    for name, source in files.items():
        for number, text in functions(source):
            place = f"{name}:{number}"
            if (seen := first.setdefault(text, place)) != place:
                found.append(f"{place} repeats {seen}")
    return found


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_no_function_is_written_twice(folder: str) -> None:
    """One folder of kernels at a time: they import nothing of each other."""
    files = [file for top in ("nvfp4_sgl", folder) for file in sources(ROOT / top)]
    found = functions_again({str(file.relative_to(ROOT)): file.read_text() for file in files})
    assert not found, f"share these functions: {found}"


def test_no_run_of_lines_is_written_twice() -> None:
    files = [file for top in ("nvfp4_sgl", *KERNEL_FOLDERS) for file in sources(ROOT / top)]
    assert len(files) > 200
    found = repeated({str(file.relative_to(ROOT)): file.read_text() for file in files})
    assert not found, f"{RUN} lines or more are written again; share them: {found}"


def lines(count: int, name: str = "x") -> str:
    return "".join(f"{name}{i} = {i}\n" for i in range(count))


INDENTED = "def f():\n" + "".join(f"    {line}\n\n    # why\n" for line in lines(RUN).splitlines())


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (lines(RUN), "y = 1\n" + lines(RUN), ["b:2 repeats a:1"]),
        ("z = 2\n" + lines(RUN + 5), INDENTED, ["b:2 repeats a:2"]),
        (lines(RUN) + "y = 1\n" + lines(RUN), "", [f"a:{RUN + 2} repeats a:1"]),
        (lines(RUN - 1), lines(RUN - 1), []),
        (lines(RUN), lines(RUN, "y"), []),
        ("import a\n" * RUN, "import a\n" * RUN, []),
        ('"""' + lines(RUN) + '"""', '"""' + lines(RUN) + '"""', []),
    ],
    ids=["repeated", "indented, with comments", "in one file", "too short", "other names", "imports", "docstring"],
)
def test_runs_are_found(first: str, second: str, expected: list[str]) -> None:
    assert repeated({"a": first, "b": second}) == expected


PAIR = 'def {}(a, b):\n    """{}"""\n    total = a + b\n    if total:\n        return {}\n'


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (PAIR.format("f", "One.", "a"), PAIR.format("g", "Two.", "a"), ["b:1 repeats a:1"]),
        (PAIR.format("f", "One.", "a"), PAIR.format("f", "One.", "b"), []),
        ("def f(a):\n    a += 1\n    return a\n", "def f(a):\n    a += 1\n    return a\n", []),
    ],
    ids=["other name", "other code", "too short"],
)
def test_functions_are_found(first: str, second: str, expected: list[str]) -> None:
    assert functions_again({"a": first, "b": second}) == expected
