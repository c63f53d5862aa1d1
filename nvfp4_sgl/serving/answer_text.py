"""The text of an answer is that of all its token ids, up to the first complete stop string; streamed or not.

A token may be a part of a character, so a text may end in an incomplete one, which a decoder shows as U+FFFD. What of
a text may be sent, before the tokens are known that follow, ends where a stop string may begin. Pure functions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet."""

MAX_CHARACTER_BYTES = 4

Decode = Callable[[list[int]], str]
"""Text of token ids. Bytes of all of them are put together first, then read as UTF-8."""


def longest(stops: Sequence[str]) -> int:
    """Most tokens in which one of ``stops`` may be spelled: a token has at least one byte."""
    return max((len(stop.encode()) for stop in stops), default=0)


def sendable(text: str, stops: Sequence[str]) -> int:
    """The number of characters of ``text`` that stay as they are and outside of every stop string, whatever follows.

    An incomplete last character does not stay, nor does what a stop string may begin with.
    """
    end = len(text) - text.endswith(REPLACEMENT)
    return min((_beginning(text[:end], stop) for stop in stops if stop), default=end)


def _beginning(text: str, stop: str) -> int:
    """The start of the longest end of ``text`` that ``stop`` begins with but does not end with."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0 and not stop.startswith(text[start:]):
        start += 1
    return start if start >= 0 else len(text)


def first_complete(text: str, stops: Sequence[str]) -> str | None:
    """The first of ``stops`` to be complete in ``text``, the longest of them if several are; ``None`` if none is."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop and stop in text]
    return min(found)[2] if found else None


def split(ids: list[int], end: int, decode: Decode) -> tuple[int, str]:
    """The number of ``ids`` that lie in the first ``end`` characters of their text, and what of these is left over."""
    text = decode(ids)
    if end == len(text):
        return len(ids), ""
    first = max(0, len(ids) - MAX_CHARACTER_BYTES * (len(text) - end + 1))  # the others hold more than is cut off
    count = bisect_right(range(first, len(ids)), end, lo=1, key=lambda some: len(decode(ids[:some]))) + first - 1
    while not text[:end].startswith(part := decode(ids[:count])):
        count -= 1  # it ends within a character
    return count, text[len(part) : end]


def cut(ids: list[int], stop: str, decode: Decode, *, keep_stop: bool) -> tuple[int, str]:
    """As :func:`split` at the stop string that the last of ``ids`` completes; all of them if it completes none.

    Args:
        keep_stop: cut behind it, not in front of it.
    """
    first = max(0, len(ids) - longest([stop]))
    window = ids[first:]
    text, before = decode(window), decode(window[:-1]).rstrip(REPLACEMENT)
    found = text.find(stop, max(0, len(before) - len(stop) + 1))
    if found < 0:
        return len(ids), ""
    count, rest = split(window, found + len(stop) * keep_stop, decode)
    return first + count, rest
