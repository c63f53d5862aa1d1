"""Checks of objects within objects, with samples made of the samples of their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nvfp4_sgl.serving.fields.checks import Check, found
from nvfp4_sgl.serving.fields.field import Field, Table, Verdict, object_fault

NO_OBJECT: tuple[Any, ...] = ([], "{}", 5, True)


def structure(table: Table) -> Check:
    """An object whose fields ``table`` knows, with samples of each."""
    inside, outside = samples(table)
    return Check("an object", lambda where, value: object_fault(table, value, where=where), inside, outside)


def samples(table: Table, given: Mapping[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
    """Objects that ``table`` takes and objects that it refuses, which differ in one field from the smallest it takes.

    Args:
        given: fields that all of them have.
    """
    required = {name: field.check.inside[0] for name, field in table.items() if field.required and field.check}
    least = {**required, **(given or {})}
    inside, outside = [least], [{**least, "no_such_field": 1}]
    for name, field in table.items():
        if name not in (given or {}):
            inside += [{**least, name: value} for value in taken(field)]
            outside += [{**least, name: value} for value in not_taken(field)]
    return inside, [*outside, *NO_OBJECT, *([{}] if required else [])]


def taken(field: Field) -> Sequence[Any]:
    """Samples of what a field takes in this server."""
    if field.check is None or (field.verdict is Verdict.OFFERED and not field.is_offered):
        return ()
    return field.check.inside


def not_taken(field: Field) -> Iterator[Any]:
    """Samples of what a field refuses in this server."""
    if field.check is None:
        yield "x"
        return
    yield from field.check.outside
    if field.verdict is Verdict.OFFERED and not field.is_offered:
        yield field.check.inside[0]


def tagged(
    tables: Mapping[str, Table],
    tag: str = "type",
    *,
    default: str | None = None,
    others: Mapping[str, str] | None = None,
) -> Check:
    """An object whose field ``tag`` says which of ``tables`` knows its other fields.

    Args:
        default: the value of ``tag`` where it is missing.
        others: values of ``tag`` that are refused, and why.
    """
    expected = f"an object whose {tag} is {' or '.join(map(repr, tables))}"

    def fault(where: str, value: Any) -> str | None:
        if not isinstance(value, dict):
            return found(where, value, expected)
        name = value.get(tag, default)
        if isinstance(name, str) and others and name in others:
            return f"{where}.{tag}: {name!r} is {others[name]}"
        table = tables.get(name) if isinstance(name, str) else None
        if table is None:
            return found(f"{where}.{tag}", name, " or ".join(map(repr, tables)))
        return object_fault(table, {key: one for key, one in value.items() if key != tag}, where=where)

    inside: list[Any] = []
    outside: list[Any] = [*NO_OBJECT, {tag: "no such thing"}, *({tag: name} for name in others or ())]
    for name, table in tables.items():
        good, bad = samples(table, {tag: name})
        inside += good
        outside += [value for value in bad if fault("", value) is not None]
    return Check(expected, fault, inside, outside)
