"""The type checker sees every kernel that the targets call, and a kernel module has one identity."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.packaging.checkout import KERNEL_FOLDERS, PACKAGE, ROOT, sources

KERNELS = tuple(f"nvfp4_sgl.{folder}" for folder in KERNEL_FOLDERS)
Name = tuple[str, str]
"""Of what is imported: its module, and its name there or, of a name that is used as ``name.attribute``, both."""


def kernel_names(source: str) -> set[Name]:
    """All that a file imports from the kernel folders, and what it uses of that by attribute: functions of a module."""
    tree = ast.parse(source)
    imported: dict[str, Name] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(KERNELS):
            imported |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
    found = set(imported.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            module, name = imported[node.value.id]
            found.add((module, f"{name}.{node.attr}"))
    return found


def is_unseen(kind: str) -> bool:
    """Whether the checker knows nothing of a name, or of what a call of it takes or gives."""
    return kind == "Any" or kind.startswith("def (*Any") or kind.endswith("-> Any")


def revealed(names: Sequence[Name], folder: Path) -> list[str]:
    """The type of each name, as the type checker sees it."""
    lines = []
    for n, (module, name) in enumerate(names):
        first, _, attribute = name.partition(".")
        lines.append(f"from {module} import {first} as k{n}\nreveal_type(k{n}{attribute and '.' + attribute})")
    snippet = folder / "kernels.py"
    snippet.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(snippet)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(found) == len(names), done.stdout + done.stderr
    return found


def test_the_type_of_no_kernel_is_any(tmp_path: Path) -> None:
    names = sorted(set().union(*(kernel_names(file.read_text()) for file in sources(PACKAGE / "targets"))))
    assert ("nvfp4_sgl.cutedsl_kernels.w4a4", "operations.product") in names and len(names) > 60
    *kinds, control = revealed([*names, ("triton", "jit")], tmp_path)
    assert control == "Any", "the check sees no Any where there is one"
    unseen = [name for name, kind in zip(names, kinds, strict=True) if is_unseen(kind)]
    assert not unseen, unseen


def test_names_are_found_however_they_are_imported() -> None:
    kernel = "nvfp4_sgl.cutedsl_kernels"
    source = f"from {kernel} import operations as o\nfrom torch import nn\nnn.Module\ndef f(x): return o.product(x)\n"
    assert kernel_names(source) == {(kernel, "operations"), (kernel, "operations.product")}


@pytest.mark.parametrize("kind", ["Any", "def (*Any, **Any) -> Any", "def (x: torch._tensor.Tensor) -> Any"])
def test_what_is_not_seen_is_known(kind: str) -> None:
    assert is_unseen(kind) and not is_unseen("def (x: Any =) -> int")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        # A third-party package of this name is installed, and gets it.
        ("triton_kernels.common.chip", "ModuleNotFoundError: No module named 'triton_kernels.common'"),
        ("cutedsl_kernels.errors", "cutedsl_kernels: expected nvfp4_sgl.cutedsl_kernels"),
    ],
)
def test_a_second_copy_of_a_kernel_module_is_refused(module: str, message: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr, done.stderr


def uses_of_triton(source: str) -> list[str]:
    """``function:line`` wherever the body of a kernel names the module ``triton``."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if not any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            continue
        names = (node for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Name))
        found += [f"{function.name}:{name.lineno}" for name in names if name.id == "triton"]
    return found


def test_kernels_call_nothing_that_sglang_replaces() -> None:
    """SGLang puts a plain function in the place of ``triton.next_power_of_2``, which Triton refuses in a kernel."""
    kernel = (
        "@triton.jit\ndef f(n):\n    tl.arange(0, triton.next_power_of_2(4))\n\ndef g(): return triton.cdiv(1, 2)\n"
    )
    assert uses_of_triton(kernel) == ["f:3"]
    for folder in KERNEL_FOLDERS:
        for file in sources(ROOT / folder):
            assert not (uses := uses_of_triton(file.read_text())), f"{file}: use tl instead: {uses}"
