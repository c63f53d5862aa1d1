"""Keeps SGLang's probe for the third-party ``triton_kernels`` package honest in a source checkout.

SGLang decides by ``importlib.util.find_spec("triton_kernels")`` whether that package is installed. Our folder of the
same name is installed as ``nvfp4_sgl.triton_kernels`` and invisible to the probe, but ``python -m`` puts the current
directory on ``sys.path``: started from the root of a checkout, the probe would find our folder. The importer of
that one directory is therefore replaced by one that does not offer the kernel folders as top-level packages; an
installed third-party ``triton_kernels`` elsewhere on the path is still found.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from pathlib import Path

_HIDDEN = frozenset({"triton_kernels", "cutedsl_kernels"})
_LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)


class CheckoutFinder(FileFinder):
    """The usual importer of a directory, minus the kernel folders."""

    def find_spec(self, fullname: str, target: object = None) -> ModuleSpec | None:
        return None if fullname in _HIDDEN else super().find_spec(fullname)


def checkout_root() -> Path | None:
    """The checkout that this package is imported from, ``None`` if it was installed as a wheel."""
    root = Path(__file__).resolve().parents[2]
    is_checkout = (root / "pyproject.toml").is_file() and (root / "cutedsl_kernels").is_dir()
    return root if is_checkout else None


def hide_kernel_folders() -> None:
    """Install :class:`CheckoutFinder` for the checkout's root, once; nothing to do in a wheel installation."""
    root = checkout_root()
    if root is None or any(getattr(hook, "hides_kernel_folders", False) for hook in sys.path_hooks):
        return
    sys.path_hooks.insert(0, _path_hook(root))
    for entry in list(sys.path_importer_cache):
        if _is_root(entry, root):
            del sys.path_importer_cache[entry]


def _path_hook(root: Path) -> Callable[[str], CheckoutFinder]:
    def hook(entry: str) -> CheckoutFinder:
        if not _is_root(entry, root):
            raise ImportError(f"{entry} is not {root}")
        return CheckoutFinder(entry, *_LOADERS)

    hook.hides_kernel_folders = True  # type: ignore[attr-defined]
    return hook


def _is_root(entry: str, root: Path) -> bool:
    return os.path.realpath(entry or Path.cwd()) == str(root)
