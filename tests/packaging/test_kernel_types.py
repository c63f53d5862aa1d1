"""The type checker sees every kernel that the targets call, and a kernel module has one identity."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import KERNEL_FOLDERS, PACKAGE, ROOT, sources


def kernel_names() -> list[tuple[str, str]]:
    """(module, name) of all that the targets import from the kernel folders."""
    found = set()
    for file in sources(PACKAGE / "targets"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                tuple(f"nvfp4_sgl.{folder}" for folder in KERNEL_FOLDERS)
            ):
                found |= {(node.module or "", alias.name) for alias in node.names}
    return sorted(found)


def test_the_type_of_no_kernel_is_any(tmp_path: Path) -> None:
    names = kernel_names()
    assert len(names) > 20
    lines = [f"from {module} import {name} as k{n}\nreveal_type(k{n})" for n, (module, name) in enumerate(names)]
    snippet = tmp_path / "kernels.py"
    snippet.write_text("\n".join([*lines, "from triton import jit\nreveal_type(jit)\n"]))
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(snippet)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert len(revealed) == len(names) + 1, done.stdout + done.stderr
    assert revealed.pop() == "Any", "the check sees no Any where there is one"
    unseen = [names[n] for n, kind in enumerate(revealed) if kind == "Any"]
    assert not unseen, unseen


@pytest.mark.parametrize("module", ["triton_kernels.common.chip", "cutedsl_kernels.errors"])
def test_a_second_copy_of_a_kernel_module_is_refused(module: str) -> None:
    folder = module.partition(".")[0]
    done = subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, capture_output=True, text=True)
    assert f"{folder}: expected nvfp4_sgl.{folder}" in done.stderr


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
