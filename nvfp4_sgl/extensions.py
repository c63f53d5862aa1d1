"""Objects that installed packages add by entry points, and objects that are imported only when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, TypeVar

from nvfp4_sgl.errors import UnsupportedError

T = TypeVar("T")


def added(group: str, kind: type[T]) -> Iterator[tuple[str, T]]:
    """The objects of an entry point group in the order of their names, each after its place, for errors.

    Raises:
        UnsupportedError: one cannot be imported, or is no ``kind``.
    """
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        where = f"entry point {point.name} of {group}, {point.value}"
        try:
            found = point.load()
        except Exception as error:
            raise UnsupportedError(
                f"{where}: {type(error).__name__}: {error}; repair or remove that package"
            ) from error
        if not isinstance(found, kind):
            raise UnsupportedError(
                f"{where}: expected {kind.__name__} of {kind.__module__}, found {type(found).__name__}; repair or"
                " remove that package"
            )
        yield where, found


def imported(where: str) -> Any:
    """The object at ``module:name``."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)
