"""The record of one field, and the check of an object against a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nvfp4_sgl.serving.fields.checks import Check, found


class Verdict(Enum):
    """Verdicts on a field that a client sends."""

    OFFERED = "does what it says"
    NO_EFFECT = "is checked and changes nothing"
    TRANSLATED = "is rewritten into the word that SGLang reads"
    REFUSED = "is refused by name"


@dataclass(frozen=True)
class Field:
    """The verdict on one field, and its check.

    Attributes:
        check: values that are taken; of a refused field, those that ask for nothing.
        why: of a field without effect, why that is harmless; of a translated one, into what; of a refused one, the
            reason and what to do.
        null: whether ``null`` is taken, as if the field were left out.
        mode: the field is offered by servers of this mode alone, and refused by others with :attr:`why`.
        harmless: of a field with a mode, values that ask for nothing, which every server takes.
        required: whether the body must have it.
    """

    verdict: Verdict
    check: Check | None
    why: str = ""
    null: bool = True
    mode: str | None = None
    required: bool = False
    harmless: Check | None = None

    @property
    def is_offered(self) -> bool:
        """Whether this server does what the field says."""
        return self.verdict is Verdict.OFFERED and (self.mode is None or self.mode in MODES)

    def fault(self, where: str, value: Any) -> str | None:
        """Why ``value`` is not taken, or ``None``."""
        if value is None:
            return None if self.null else found(where, value, self.check.expected if self.check else "nothing")
        if self.is_offered or self.verdict in (Verdict.NO_EFFECT, Verdict.TRANSLATED):
            assert self.check is not None
            return self.check.fault(where, value)
        harmless = self.check if self.verdict is Verdict.REFUSED else self.harmless
        return None if harmless and harmless.fault(where, value) is None else f"{where}: {self.why}"


MODES: set[str] = set()
"""Modes of this process's server, of which some fields depend (:attr:`Field.mode`); set when it starts."""

Table = Mapping[str, Field]
"""Every field of an object, by name."""


def offered(
    check: Check,
    *,
    null: bool = True,
    required: bool = False,
    mode: str | None = None,
    why: str = "",
    harmless: Check | None = None,
) -> Field:
    """A field that does what it says."""
    return Field(Verdict.OFFERED, check, why, null and not required, mode, required, harmless)


def without_effect(check: Check, why: str, *, null: bool = True) -> Field:
    """A field that clients send and that changes nothing."""
    return Field(Verdict.NO_EFFECT, check, why, null)


def translated(check: Check, why: str) -> Field:
    """A field that :mod:`nvfp4_sgl.serving.fields.translation` rewrites.

    Args:
        why: into what.
    """
    return Field(Verdict.TRANSLATED, check, why)


def refused(why: str, *, harmless: Check | None = None, null: bool = True) -> Field:
    """A field that is refused unless it is ``null``, if that is taken, or ``harmless``.

    Args:
        why: the reason and what to do.
    """
    return Field(Verdict.REFUSED, harmless, why, null)


def object_fault(table: Table, value: Any, *, where: str = "") -> str | None:
    """Why an object is not taken, or ``None``.

    Args:
        where: its own path, empty for the body.
    """
    if not isinstance(value, dict):
        return found(where or "body", value, "an object")
    prefix = f"{where}." if where else ""
    for name, one in value.items():
        field = table.get(name)
        if field is None:
            return f"{prefix}{name[:80]}: unknown field; leave it out"
        if (fault := field.fault(prefix + name, one)) is not None:
            return fault
    missing = next((name for name, field in table.items() if field.required and name not in value), None)
    return f"{prefix}{missing}: missing; expected {table[missing].check.expected}" if missing else None  # type: ignore[union-attr]


def object_of(table: Table, *inside: Mapping[str, Any]) -> Check:
    """An object whose fields ``table`` knows, such as those ``inside``."""
    return Check(
        "an object",
        lambda where, value: object_fault(table, value, where=where),
        inside or ({},),
        ({"no_such_field": 1}, [], "{}", 5, True),
    )
