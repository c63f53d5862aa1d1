"""Rows of the tables of flags: a flag works, is refused, or has no effect with our model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4_sgl.config import ARCHITECTURE

OFF: tuple[Any, ...] = (None, False, 0, "", "none", "null", "off", "disabled", "auto", (), [], {})
"""Values that leave a switch off."""
ONE: tuple[Any, ...] = (None, 1)
"""Values that ask for one of something."""

NOT_IMPLEMENTED = f"not implemented for {ARCHITECTURE} by this package; leave the flag out"


@dataclass(frozen=True)
class Works:
    """A flag that is honoured.

    Attributes:
        shown: the test that shows it (``tests/….py::test_…``), or why the flag cannot touch what is ours.
        values: the values that are honoured; ``None``: all that SGLang takes, of a flag without choices.
        refused: SGLang's further choices. Every choice is in one of both.
    """

    shown: str
    values: tuple[Any, ...] | None = None
    refused: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A flag that selects what is not implemented.

    Attributes:
        off: values that do not select it.
        why: what the error says after the flag and its value.
    """

    off: tuple[Any, ...] = OFF
    why: str = NOT_IMPLEMENTED


@dataclass(frozen=True)
class WithoutEffect:
    """A flag that changes nothing with our model; the start says so if it is given.

    Attributes:
        why: what the flag is for.
    """

    why: str


Row = Works | Refused | WithoutEffect


def works(shown: str, *names: str) -> Mapping[str, Row]:
    """Rows of flags without choices that work for one reason."""
    return dict.fromkeys(names, Works(shown))


def refused(off: tuple[Any, ...], *names: str) -> Mapping[str, Row]:
    """Rows of flags that are refused but for the values ``off``."""
    return dict.fromkeys(names, Refused(off))


def without_effect(why: str, *names: str) -> Mapping[str, Row]:
    """Rows of flags that have no effect for one reason."""
    return dict.fromkeys(names, WithoutEffect(why))
