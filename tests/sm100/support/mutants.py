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

from nvfp4_sgl.cutedsl_kernels import sm100
from nvfp4_sgl.cutedsl_kernels.sm100.arguments import Arguments
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.native import NativeKernel
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, compile_for


class _Native:
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

    Raises:
        ValueError: one of the texts does not occur exactly once.
    """
    name = f"{sm100.__name__.rpartition('.')[0]}.{folder.name.replace('-', '_')}"
    package = folder / "sm100"
    shutil.copytree(Path(next(iter(sm100.__path__))), package, ignore=shutil.ignore_patterns("__pycache__"))
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
        make = importlib.import_module(f"{name}.epilogue").Epilogue
        changed = make(**{field.name: getattr(epilogue, field.name) for field in fields(epilogue)})
        entry = importlib.import_module(f"{name}.entry").Entry
        compiled = compile_for("sm_100a", entry(shape, changed, programmatic_launch), *entry.example(shape))
        return Compiled(_Native(compiled.function), compiled.ptx)
    finally:
        for known in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            del sys.modules[known]
