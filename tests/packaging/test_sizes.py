"""Functions stay short, and take few positional arguments. A kernel is one launch, and may be as long as that takes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.packaging.checkout import ROOT

FOLDERS = ("nvfp4_sgl", "triton_kernels", "cutedsl_kernels", "launch")
MAX_FUNCTION_LINES = 80
"""Bound on a function's lines, signature and docstring not counted."""
MAX_POSITIONAL_ARGUMENTS = 15
"""Bound on positional arguments."""
KERNELS = ("jit", "kernel")
"""Names of the decorators of what is compiled for a GPU."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_kernel(function: Function) -> bool:
    decorators = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(isinstance(d, ast.Attribute) and d.attr in KERNELS for d in decorators)


def functions(source: str) -> Iterator[Function]:
    """All of a file but kernels and what is inside of them."""
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        node = left.pop()
        if isinstance(node, Function):
            if is_kernel(node):
                continue
            yield node
        left += ast.iter_child_nodes(node)


def problems(source: str) -> list[str]:
    """Functions that are too long or take too much."""
    found = []
    for function in functions(source):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = function.end_lineno - body[0].lineno + 1 if body and function.end_lineno else 0
        arguments = len(function.args.posonlyargs) + len(function.args.args)
        if lines > MAX_FUNCTION_LINES or arguments > MAX_POSITIONAL_ARGUMENTS:
            found.append(f"{function.name}: {lines} lines, {arguments} positional arguments")
    return found


def test_functions() -> None:
    files = [
        file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in str(file)
    ]
    assert len(files) > 300
    found = {str(file.relative_to(ROOT)): problem for file in files for problem in problems(file.read_text("utf-8"))}
    assert not found


def test_what_is_too_much_is_seen() -> None:
    body = "\n".join(f"    x = {n}" for n in range(MAX_FUNCTION_LINES + 1))
    arguments = ", ".join(f"a{n}" for n in range(MAX_POSITIONAL_ARGUMENTS + 1))
    assert len(problems(f"def long():\n{body}\n")) == len(problems(f"async def f({arguments}):\n    pass\n")) == 1
    assert not problems(f"@triton.jit\ndef kernel({arguments}):\n{body}\n")
    assert not problems(f'def f():\n    """{body}"""\n')
