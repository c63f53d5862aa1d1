"""Changes modules as soon as they have been imported; for the ``sitecustomize`` files of test processes.

Those find it by its path, since no checkout is on the path of a server::

    specification = importlib.util.spec_from_file_location("on_import", Path(__file__).parents[1] / "on_import.py")
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]

Patch = Callable[[Any], None]


class _Patcher:
    def __init__(self, patches: Mapping[str, Patch]):
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._patches:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_patch(module: ModuleType) -> None:
            execute(module)
            self._patches[name](module)

        loader.exec_module = execute_and_patch
        return spec


def patch_on_import(patches: Mapping[str, Patch]) -> None:
    """Call each patch with its module, by name, right after the module's code has run: at once if it has."""
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    sys.meta_path.insert(0, _Patcher(patches))


def offer_tests() -> None:
    """Let this process import ``tests.*``, and nothing else of the checkout."""
    package = ModuleType("tests")
    package.__path__ = [str(TESTS)]
    sys.modules.setdefault("tests", package)
