"""Says in answers of ``/v1/messages`` which stop sequence ended them, as Anthropic's API does.

SGLang makes chats of such requests, and ``end_turn`` of every stop in their answers. The chat's answer knows the
sequence; in a stream it is noted where the chat's events pass, and put into the event that ends the message.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from nvfp4_sgl.serving.requests import serves_our_model

MATCHED = '"matched_stop":"'
"""In an event of a chat: a stop string. What ends an answer otherwise is a token's number, or null."""

END = "event: message_delta\n"

_matched: ContextVar[list[str] | None] = ContextVar("stop sequences that ended the stream of this task", default=None)


def convert_response(original: Callable[..., Any], handler: Any, response: Any) -> Any:
    """Hook around the answer of a request without a stream."""
    answer = original(handler, response)
    if serves_our_model() and response.choices and isinstance(response.choices[0].matched_stop, str):
        answer.stop_reason, answer.stop_sequence = "stop_sequence", response.choices[0].matched_stop
    return answer


async def note_in_chat(original: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncIterator[str]:
    """Hook around the events of a chat."""
    matched = _matched.get()
    async with aclosing(original(*args, **kwargs)) as events:
        async for event in events:
            if matched is not None and MATCHED in event:
                matched.append(json.loads(event.removeprefix("data: "))["choices"][0]["matched_stop"])
            yield event


async def stream_message(original: Callable[..., Any], *args: Any, **kwargs: Any) -> AsyncIterator[str]:
    """Hook around the events of a message."""
    matched: list[str] = []
    _matched.set(matched if serves_our_model() else None)
    async with aclosing(original(*args, **kwargs)) as events:
        async for event in events:
            yield ended_by(matched[-1], event) if matched and event.startswith(END) else event


def ended_by(sequence: str, event: str) -> str:
    """The event that ends a message, with the stop sequence that ended it."""
    data = json.loads(event.removeprefix(END).removeprefix("data: "))
    data["delta"].update(stop_reason="stop_sequence", stop_sequence=sequence)
    return f"{END}data: {json.dumps(data)}\n\n"
