"""Data flows one way: launch -> nvfp4_sgl -> kernel folders -> formats -> torch. Read from the imports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.packaging.checkout import KERNEL_FOLDERS, PACKAGE, ROOT, Import, imports, sources

KERNELS_MAY_IMPORT = sys.stdlib_module_names | {"torch", "triton", "cutlass", "cuda", "numpy"}
FLOOR = ("nvfp4_sgl.formats", "nvfp4_sgl.errors", "nvfp4_sgl.limits")
"""Below the kernel folders; torch is all that it needs."""
SGLANG_IS_KNOWN_TO = PACKAGE / "serving"


def upward_imports(source: str, depth: int) -> list[str]:
    """Imports that a kernel file must not have; ``depth`` is 1 for a file right in its folder."""
    return [
        f"line {found.line}: {'.' * found.level}{found.module}"
        for found in imports(source)
        if (found.level > depth if found.level else not _is_below_kernels(found))
    ]


def _is_below_kernels(found: Import) -> bool:
    return found.top in KERNELS_MAY_IMPORT or any(f"{found.module}.".startswith(f"{part}.") for part in FLOOR)


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_kernels_import_neither_upwards_nor_each_other(folder: str) -> None:
    for file in sources(ROOT / folder):
        bad = upward_imports(file.read_text(), depth=len(file.relative_to(ROOT).parts) - 1)
        assert not bad, f"{file.relative_to(ROOT)}: {bad}"


@pytest.mark.parametrize(
    "source",
    [
        "import sglang",
        "from sglang.srt import utils",
        "import nvfp4_sgl.config",
        "def f():\n    from nvfp4_sgl import config",
        "from nvfp4_sgl.cutedsl_kernels import gemm",
        "from .. import errors",
        "from ..cutedsl_kernels import gemm",
        "import transformers",
    ],
)
def test_upward_imports_are_seen(source: str) -> None:
    assert upward_imports(source, depth=1)


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import triton.language as tl",
        "from . import layout",
        "import os",
        "from nvfp4_sgl.formats.rows import Rows",
    ],
)
def test_downward_imports_pass(source: str) -> None:
    assert not upward_imports(source, depth=1)


ARCHITECTURES = ("sm90", "sm100")
"""Folders of ``cutedsl_kernels``: what two of them need is in ``common``."""


def test_no_architecture_imports_another() -> None:
    folders = {name: ROOT / "cutedsl_kernels" / name for name in (*ARCHITECTURES, "common")}
    for own, folder in folders.items():
        others = {name for name in ARCHITECTURES if name != own}
        files = sources(folder)
        assert files
        for file in files:
            named = {part for found in imports(file.read_text()) for part in found.module.split(".")}
            assert not named & others, f"{file.relative_to(ROOT)} imports {named & others}"


def test_only_serving_knows_sglang() -> None:
    for file in sources(PACKAGE):
        if file.is_relative_to(SGLANG_IS_KNOWN_TO):
            continue
        tops = {found.top for found in imports(file.read_text())}
        assert "sglang" not in tops, f"{file.relative_to(ROOT)} imports sglang; only nvfp4_sgl/serving may"


def test_the_package_imports_neither_tests_nor_launch() -> None:
    for file in sources(PACKAGE):
        tops = {found.top for found in imports(file.read_text())}
        assert not tops & {"tests", "launch", *KERNEL_FOLDERS}, file.relative_to(ROOT)


def test_every_folder_of_sources_is_a_package() -> None:
    """A folder without ``__init__.py`` would be missing from the wheel."""
    folders: set[Path] = {file.parent for top in ("nvfp4_sgl", *KERNEL_FOLDERS) for file in sources(ROOT / top)}
    assert not [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_floor_needs_torch_alone() -> None:
    for file in [PACKAGE / "errors.py", PACKAGE / "limits.py", *sources(PACKAGE / "formats")]:
        for found in imports(file.read_text()):
            below = found.top in sys.stdlib_module_names | {"torch"} or found.module.startswith(FLOOR)
            assert below and not found.level, f"{file.relative_to(ROOT)}, line {found.line}: {found.module}"
