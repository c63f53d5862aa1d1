"""Looks private names up, and compares the ledger with the SGLang that is installed.

Names are resolved when they are asked for, not when a module is imported: SGLang loads our platform while it is
itself half imported. ``python -m nvfp4_sgl.serving.sglang.ledger`` compares all of them.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import sys
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving.sglang.hooked import HOOKS
from nvfp4_sgl.serving.sglang.names import MODULES, NAMES
from nvfp4_sgl.serving.sglang.private import VERSION


def find(name: str) -> Any:
    """The object that :data:`.names.NAMES` calls ``name``."""
    return resolve_name(NAMES[name].path)


def module(name: str) -> ModuleType:
    """The module that :data:`.names.MODULES` calls ``name``, imported if it is not yet."""
    return importlib.import_module(MODULES[name].path)


def is_imported(name: str) -> bool:
    """Whether this process has imported the module that :data:`.names.MODULES` calls ``name``."""
    return MODULES[name].path in sys.modules


def require_supported_version() -> None:
    """:class:`UnsupportedError` unless the installed SGLang is :data:`VERSION`."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise UnsupportedError(
            f"SGLang {VERSION} is required, found {found}; run: pip install 'sglang=={VERSION}'"
            " (or set NVFP4_SGL_DISABLE=1 to run SGLang without this package)"
        )


def parameters(function: Any) -> str:
    """Names of the parameters of ``function``, as :attr:`.private.Private.parameters` spells them."""
    names: list[str] = []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(name.startswith("*") for name in names):
            names.append("*")
        names.append(str(one.replace(default=one.empty, annotation=one.empty)))
    return ", ".join(names)


def differences() -> list[str]:
    """Differences between the installed SGLang and the ledger, a line each."""
    found = []
    for private in (*NAMES.values(), *MODULES.values(), *HOOKS.values()):
        try:
            value = resolve_name(private.path)
        except (ImportError, AttributeError):
            found.append(f"{private.path}: missing ({private.why})")
            continue
        if private.parameters is not None and (theirs := parameters(value)) != private.parameters:
            found.append(
                f"{private.path}: expected parameters ({private.parameters}), found ({theirs}) ({private.why})"
            )
    return found


if __name__ == "__main__":
    lines = differences()
    print(*lines, sep="\n")
    raise SystemExit(bool(lines))
