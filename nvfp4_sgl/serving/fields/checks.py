"""Kinds of JSON values that a field may take. Each has values for tests: some that it takes, some that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Fault = Callable[[str, Any], str | None]
"""``fault(where, value)``: a message that begins with ``where``, the path of the field; ``None`` if all is well."""

INT64 = 2**63 - 1
MAX_TOKENS = 2**20
"""Bound on tokens of one sequence: the longest context of the architecture."""

NOT_JSON_INT: tuple[Any, ...] = (True, 1.5, "1", [], {})
"""What is mistaken for an integer."""


@dataclass(frozen=True)
class Check:
    """A check of a value, with samples.

    Attributes:
        expected: completes "expected …".
        fault: why a value is refused.
        inside: values that are accepted, the ends of a range among them.
        outside: values that are refused: beyond both ends, of other types.
        depth: arrays in each other.
    """

    expected: str
    fault: Fault
    inside: Sequence[Any]
    outside: Sequence[Any]
    depth: int = 0


def found(where: str, value: Any, expected: str) -> str:
    """The message for a value that is not taken."""
    return f"{where}: found {value!r:.80}; expected {expected}"


def plain(expected: str, accepts: Callable[[Any], bool], *, inside: Sequence[Any], outside: Sequence[Any]) -> Check:
    """A check by a predicate."""

    def fault(where: str, value: Any) -> str | None:
        return None if accepts(value) else found(where, value, expected)

    return Check(expected, fault, inside, outside)


def is_int(value: Any) -> bool:
    """Whether ``value`` is an integer; ``true`` is none."""
    return type(value) is int


def integer(low: int, high: int) -> Check:
    """An integer from ``low`` to ``high``."""
    return plain(
        f"an integer from {low} to {high}",
        lambda value: is_int(value) and low <= value <= high,
        inside=(low, high),
        outside=(low - 1, high + 1, *NOT_JSON_INT),
    )


def number(low: float, high: float, *, above: bool = False) -> Check:
    """A number from ``low`` to ``high``, or, if ``above``, one above ``low``."""

    def accepts(value: Any) -> bool:
        return type(value) in (int, float) and (low < value if above else low <= value) and value <= high

    beyond = (high * 1.01,) if high < 1e300 else ()
    return plain(
        f"a number {'above' if above else 'from'} {low:g} to {high:g}",
        accepts,
        inside=((low + high) / 2 if above else low, high),
        outside=(low if above else low - 1, *beyond, True, "1", [], {}),
    )


def boolean() -> Check:
    """``true`` or ``false``."""
    return plain(
        "true or false", lambda value: type(value) is bool, inside=(True, False), outside=(1, 0, "true", [True], {})
    )


def text(shortest: int = 0, longest: int | None = None) -> Check:
    """A string of so many characters; ``shortest`` is 0 or 1."""
    most = float("inf") if longest is None else longest
    bounds = f" of {shortest} to {longest} characters" if longest is not None else ", not empty" if shortest else ""
    return plain(
        f"a string{bounds}",
        lambda value: isinstance(value, str) and shortest <= len(value) <= most,
        inside=("x" * max(shortest, 1),),
        outside=(*([""] if shortest else []), *(["x" * (longest + 1)] if longest is not None else []), 5, True, {}, []),
    )


def one_of(*values: Any) -> Check:
    """One of ``values``."""
    return plain(
        " or ".join(repr(value) for value in values),
        lambda value: any(value == one and type(value) is type(one) for one in values),
        inside=values,
        outside=("nonsense", -7, [], {}),
    )


def array_of(check: Check, *, least: int = 0, most: int | None = None) -> Check:
    """An array of values that ``check`` takes."""
    size = f" of {least} to {most}" if most is not None else f" of {least} or more" if least else ""
    expected = f"an array{size}, each {check.expected}"

    def fault(where: str, value: Any) -> str | None:
        if not isinstance(value, list):
            return found(where, value, expected)
        if len(value) < least or (most is not None and len(value) > most):
            return f"{where}: found {len(value)} entries; expected an array{size}"
        faults = (check.fault(f"{where}[{place}]", one) for place, one in enumerate(value))
        return next((one for one in faults if one is not None), None)

    first = check.inside[0]
    too_few = [[first] * (least - 1)] if least else []
    too_many = [[first] * (most + 1)] if most is not None and most < 10_000 else []
    bad = [[first, check.outside[0]], [None], {}, "", 5]
    return Check(
        expected,
        fault,
        ([first] * max(least, 1), [first] * max(least, 2)),
        (*too_few, *too_many, *bad),
        check.depth + 1,
    )


def either(*checks: Check) -> Check:
    """A check that any of ``checks`` satisfies. The message is that of the check for arrays as deep as the value."""
    expected = ", or ".join(check.expected for check in checks)

    def fault(where: str, value: Any) -> str | None:
        if any(check.fault(where, value) is None for check in checks):
            return None
        alike = [check for check in checks if check.depth == depth_of(value)]
        return alike[0].fault(where, value) if len(alike) == 1 else found(where, value, expected)

    inside = [value for check in checks for value in check.inside]
    tried = [value for check in checks for value in check.outside]
    outside = [value for value in tried if fault("", value) is not None]
    return Check(expected, fault, inside, outside)


def depth_of(value: Any) -> int:
    """Arrays in each other, by the first entries."""
    depth = 0
    while isinstance(value, list):
        depth, value = depth + 1, value[0] if value else None
    return depth


def per_prompt(check: Check) -> Check:
    """A check of one value, or of one for each prompt; :mod:`nvfp4_sgl.serving.requests` counts them."""
    return either(check, array_of(check, least=1))


def token_ids(*, least: int = 1, most: int = MAX_TOKENS) -> Check:
    """An array of token ids; whether the vocabulary has them is known once the request is parsed."""
    expected = f"an array of {least} to {most} token ids, integers from 0 on"

    def fault(where: str, value: Any) -> str | None:
        if not isinstance(value, list):
            return found(where, value, expected)
        if not least <= len(value) <= most:
            return f"{where}: found {len(value)} entries; expected {expected}"
        if set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) <= INT64)):
            return None
        place, one = next((place, one) for place, one in enumerate(value) if not is_int(one) or not 0 <= one <= INT64)
        return f"{where}: token id {one!r:.40} at {place}; expected an integer from 0 on"

    outside = [[-1], [2**70], [30, "a"], [30, None], [True], [1.5], [[30], 31], {}, "30", 30]
    return Check(expected, fault, ([30] * max(1, least),), [*([[]] if least else []), *outside], 1)


def json_object() -> Check:
    """Any JSON object."""
    return plain("an object", lambda value: isinstance(value, dict), inside=({},), outside=([], "{}", 5, True))
