"""Kernels with a mistake planted: instructions left out of their PTX, or their sources changed and compiled anew."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from nvfp4_sgl.cutedsl_kernels import library
from nvfp4_sgl.cutedsl_kernels.common.arguments import Arguments
from nvfp4_sgl.cutedsl_kernels.common.native import NativeKernel
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, compile_for


class NativeFunction:
    """A compiled function behind its C interface; loaded when first called, which is inside the emulator."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._kernel: NativeKernel | None = None

    def __call__(self, arguments: Arguments, stream: int) -> None:
        self._kernel = self._kernel or NativeKernel.of("mutant", self._function)
        self._kernel(arguments, stream)


def without_each(compiled: Compiled, pattern: str) -> Iterator[tuple[str, Compiled]]:
    """The kernel without one statement that matches, for each of them; and what was left out, by its line.

    Args:
        compiled: the kernel.
        pattern: a regular expression for the begin of an instruction, after its guard.
    """
    for found in re.finditer(rf"^[ \t]*(?:@!?%p\d+[ \t]+)?{pattern}[^;]*;", compiled.ptx, re.M):
        ptx = f"{compiled.ptx[: found.start()]}//{found[0].strip()}{compiled.ptx[found.end() :]}"
        line = compiled.ptx.count("\n", 0, found.start()) + 1
        yield f"line {line}: {found[0].strip()}", Compiled(compiled.function, ptx)


def compile_changed(
    folder: Path, file: str, changes: dict[str, str], shape: KernelShape, epilogue: Epilogue,
    programmatic_launch: bool = False,
) -> Compiled:  # fmt: skip
    """A kernel compiled from a copy of its sources in ``folder``, in which texts of one file are replaced.

    Args:
        file: for example "sm100/gemm.py".

    Raises:
        ValueError: one of the texts does not occur exactly once.
    """
    original = library.SOURCES
    name = f"{library.__name__.rpartition('.')[0]}.{folder.name.replace('-', '_')}"
    package = folder / "kernels"
    for part in library.KERNEL_FOLDERS:
        shutil.copytree(original / part, package / part, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").touch()
    shutil.copy(original / "errors.py", package)
    text = (package / file).read_text()
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{file}: {old!r} occurs {text.count(old)} times, expected once")
        text = text.replace(old, new)
    (package / file).write_text(text)
    spec = importlib.util.spec_from_file_location(
        name, package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        make = importlib.import_module(f"{name}.sm100.epilogue").Epilogue
        changed = make(**{field.name: getattr(epilogue, field.name) for field in fields(epilogue)})
        gemm = importlib.import_module(f"{name}.sm100.gemm").BlockScaledGemm(shape, changed)
        entry = importlib.import_module(f"{name}.common.entry").Entry(gemm, programmatic_launch)
        compiled = compile_for("sm_100a", entry, *entry.example())
        return Compiled(NativeFunction(compiled.function), compiled.ptx)
    finally:
        for known in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            del sys.modules[known]
