"""A private name of SGLang, and the version that all of them were read from."""

from __future__ import annotations

from dataclasses import dataclass

VERSION = "0.5.23"
"""The only SGLang version that this package supports."""


@dataclass(frozen=True)
class Private:
    """A private name.

    Attributes:
        path: where it lives, as :func:`pkgutil.resolve_name` takes it.
        why: what it is touched for, and so what fails if it changes.
        parameters: names of a function's parameters, ``*`` before those that are given by name; ``None``: not compared.
    """

    path: str
    why: str
    parameters: str | None = None
