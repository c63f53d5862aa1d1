"""Environment variables that turn something on or off. Needs no torch."""

from __future__ import annotations

import os

from nvfp4_sgl.errors import ConfigError


def value_of(name: str) -> bool | None:
    """Whether the variable is 1; ``None`` if it is unset or empty.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    given = os.environ.get(name, "")
    if given not in ("", "0", "1"):
        raise ConfigError(f"{name}: expected 0 or 1, found {given!r}; correct it, or unset it")
    return None if not given else given == "1"
