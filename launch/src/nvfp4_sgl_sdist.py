"""setuptools' ``sdist`` for this checkout (pyproject.toml names it as ``cmdclass``): whole, and links stay links.

By itself setuptools would leave out pins, tests and documents, and turn the links to the kernel folders into second
copies.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from setuptools.command.sdist import sdist

FOLDERS = (".ci", ".github", "cutedsl_kernels", "docs", "examples", "launch", "nvfp4_sgl", "tests", "triton_kernels")
FILES = (
    ".editorconfig",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CITATION.cff",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "pyproject.toml",
)


class Sdist(sdist):
    """Copies :data:`FOLDERS` and :data:`FILES` beside the metadata that setuptools writes."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        """Fill ``base_dir``; FileNotFoundError if something of the checkout is missing."""
        package = FOLDERS + FILES
        super().make_release_tree(base_dir, [file for file in files if Path(file).parts[0] not in package])
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(name, Path(base_dir) / name, symlinks=True, ignore=ignored, dirs_exist_ok=True)
        for name in FILES:
            shutil.copy2(name, Path(base_dir) / name)
