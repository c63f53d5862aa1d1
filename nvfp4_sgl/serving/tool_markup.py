"""Strict parser of the tool calls in DeepSeek-V4's answers: what parses is a call, what does not is content.

A block of calls, as the encoder of prompts writes it (``｜DSML｜`` is one token, also where it is not escaped here)::

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

A ``string="true"`` value is the text between the tags; any other value is JSON. Whitespace between tags is free, and
``<｜DSML｜invoke name="clock"/>`` is a call without parameters. The two newlines before a block belong to it.

A call is read when its ``invoke`` closes, all of it at once: it has exactly the arguments that the model wrote. At what
cannot be read the block ends, and the text since the last call is content, markup included:

* a parameter without ``string=``, a value that is not JSON, a parameter or a JSON key that is given twice
* text between tags, or a tag out of place
* a function that the request does not declare
* a call that the answer's end cuts off
"""

from __future__ import annotations

import json
import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

TOKEN = "｜DSML｜"
"""The token in each tag of the markup."""

MARK = "\ud800"
"""Stands for :data:`TOKEN` where the model wrote the token, not its text; decoded text has no lone surrogate."""

OPEN, CLOSE = f"<{MARK}tool_calls>", f"</{MARK}tool_calls>"
INVOKE, END = f'<{MARK}invoke name="', f"</{MARK}invoke>"
HEAD = re.compile(rf'{INVOKE}(?P<name>[^"{MARK}]*)"(?P<empty>/?)>')
PARAMETER = re.compile(
    rf'<{MARK}parameter name="(?P<name>[^"{MARK}]*)" string="(?P<string>true|false)">'
    rf"(?P<value>[^{MARK}]*)</{MARK}parameter>"
)
SPACE = " \t\r\n"


@dataclass(frozen=True)
class Call:
    """One call: the function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


def arguments_of(body: str, *, forced: bool = False) -> str | None:
    """The JSON object of the parameters between the tags of an ``invoke``; ``None`` where they are malformed.

    Args:
        forced: whether a grammar held the answer to calls. xgrammar's lets a text stand under ``string="false"``, and
            nothing but JSON where the schema wants another type: what is not JSON there is a text.
    """
    fields: dict[str, str] = {}
    position = 0
    while position < len(body):
        if body[position] in SPACE:
            position += 1
            continue
        parameter = PARAMETER.match(body, position)
        if parameter is None or parameter["name"] in fields:
            return None
        value = parameter["value"]
        if parameter["string"] == "true" or (forced and not is_json(value)):
            value = json.dumps(value, ensure_ascii=False)
        elif not is_json(value):
            return None
        fields[parameter["name"]] = value
        position = parameter.end()
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in fields.items()) + "}"


def is_json(text: str) -> bool:
    """Whether ``text`` is JSON by its standard, which has no ``NaN``, and gives no key of an object twice."""
    try:
        json.loads(text, parse_constant=_refuse, parse_int=str, parse_float=str, object_pairs_hook=_require_distinct)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant}: not JSON")


def _require_distinct(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key is given twice")


class MarkupScanner:
    """Reads calls out of a text that arrives in pieces; however it is cut, content and calls are the same.

    Args:
        names: functions that may be called; ``None`` for any.
        spelled: whether :data:`TOKEN` counts wherever its text stands, in whatever tokens: where a grammar holds the
            whole answer to be calls, it takes the text alone. Then also a text under ``string="false"`` counts.
    """

    def __init__(self, names: Container[str] | None = None, *, spelled: bool = False):
        self._names, self._spelled = names, spelled
        self._tail = ""  # with which TOKEN may begin, if it may be spelled
        self._buffer = ""
        self._in_block = False
        self._opener = ""  # of the block, as long as no call of it has been read
        self._searched = 0  # characters of the buffer in which no END begins

    def feed(self, text: str, *, final: bool = False) -> tuple[str, list[Call]]:
        """Content and calls that are certain after ``text``, which holds :data:`MARK` for each :data:`TOKEN`.

        Args:
            final: whether the text ends here, so that nothing is withheld.
        """
        if self._spelled:
            text = (self._tail + text).replace(TOKEN, MARK)
            held = 0 if final else _prefix_at_end(text, TOKEN)
            text, self._tail = text[: len(text) - held], text[len(text) - held :]
        self._buffer += text
        content: list[str] = []
        calls: list[Call] = []
        while self._step_in_block(content, calls, final) if self._in_block else self._step_outside(content, final):
            pass
        return "".join(content).replace(MARK, TOKEN), calls

    def _step_outside(self, content: list[str], final: bool) -> bool:
        """Advance to the next block, or pass on text that begins none; returns whether there is more to do."""
        before, opener, after = self._buffer.partition(OPEN)
        held = 0 if opener or final else _prefix_at_end(before, OPEN)
        gap = before[: len(before) - held]
        text = gap if final and not opener else gap.removesuffix("\n").removesuffix("\n")
        content.append(text)
        if opener:
            self._opener = before[len(text) :] + OPEN
            self._in_block = True
            self._buffer = after
        else:
            self._buffer = before[len(text) :]
        return self._in_block

    def _step_in_block(self, content: list[str], calls: list[Call], final: bool) -> bool:
        """Read a call or the block's end, or find that it is no block; whether there is more to do."""
        tags = self._buffer.lstrip(SPACE)
        if not self._opener:
            if tags.startswith(CLOSE):
                return self._leave(tags.removeprefix(CLOSE))
            if CLOSE.startswith(tags):  # or nothing but space
                if final:
                    self._leave("")
                return False
        head = HEAD.match(tags)
        if head is None:
            begun = INVOKE.startswith(tags) or (tags.startswith(INVOKE) and MARK not in tags[len(INVOKE) :])
            if begun and not final:
                return False
        elif self._names is None or head["name"] in self._names:
            skipped = len(self._buffer) - len(tags)
            end = head.end() + skipped if head["empty"] else self._buffer.find(END, self._searched)
            if end == -1 and not final:
                self._searched = max(0, len(self._buffer) - len(END) + 1)
                return False
            body = self._buffer[head.end() + skipped : end]
            arguments = arguments_of(body, forced=self._spelled) if end != -1 else None
            if arguments is not None:
                calls.append(Call(head["name"], arguments))
                self._opener, self._searched = "", 0
                self._buffer = self._buffer[end + (0 if head["empty"] else len(END)) :]
                return True
        content.append(self._opener)
        return self._leave(self._buffer)

    def _leave(self, rest: str) -> bool:
        self._in_block, self._opener, self._searched = False, "", 0
        self._buffer = rest
        return bool(rest)


def _prefix_at_end(text: str, sought: str) -> int:
    """Characters at the end of ``text`` with which ``sought`` begins."""
    return next((n for n in range(min(len(sought) - 1, len(text)), 0, -1) if sought.startswith(text[-n:])), 0)
