"""Import the package with one line of one module changed."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGE = "nvfp4_sgl"
KERNEL_FOLDERS = ("triton_kernels", "cutedsl_kernels")


class _MutatingLoader(importlib.abc.SourceLoader):
    """Loads one module from its source with ``old`` replaced by ``new``.

    The changed source lies in ``folder``: Triton reads kernels from the files that their functions name.
    """

    def __init__(self, path: str, old: str, new: str, folder: str):
        source = Path(path).read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{path}: expected exactly one {old!r}, found {source.count(old)}"
        self._path = Path(folder) / Path(path).name
        self._path.write_text(source.replace(old, new), encoding="utf-8")

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def path_stats(self, path: str) -> dict[str, int]:
        raise OSError("never take the cached bytecode")


class _MutatingFinder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, old: str, new: str, folder: str):
        self._module, self._old, self._new, self._folder = module, old, new, folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        found = PathFinder.find_spec(fullname, path)
        assert found is not None and found.origin is not None
        loader = _MutatingLoader(found.origin, self._old, self._new, self._folder)
        return importlib.util.spec_from_loader(fullname, loader, origin=found.origin)


@contextmanager
def mutated(module: str, old: str, new: str) -> Iterator[None]:
    """Inside the context, ``import nvfp4_sgl...`` gives fresh modules; ``module`` has ``old`` replaced by ``new``.

    Kernel folders stay as they are unless the module is one of theirs: torch takes an operator's registration once.
    """
    kept = tuple(f"{PACKAGE}.{folder}" for folder in KERNEL_FOLDERS if not module.startswith(f"{folder}."))

    def own() -> dict[str, ModuleType]:
        return {
            name: m
            for name, m in sys.modules.items()
            if (name == PACKAGE or name.startswith(PACKAGE + ".")) and not name.startswith(kept)
        }

    saved = own()
    for name in saved:
        del sys.modules[name]
    with tempfile.TemporaryDirectory(prefix="mutated-") as folder:
        finder = _MutatingFinder(f"{PACKAGE}.{module}", old, new, folder)
        sys.meta_path.insert(0, finder)
        try:
            yield
            assert f"{PACKAGE}.{module}" in sys.modules, f"{module} was never imported"
        finally:
            sys.meta_path.remove(finder)
            for name in own():
                del sys.modules[name]
            sys.modules.update(saved)
