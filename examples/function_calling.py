"""Function calling: a tool that the model must call, its result, and the answer after it.

    python examples/function_calling.py http://127.0.0.1:30000

Needs a running server. A grammar holds even a model that knows no tools, as launch/demo's, to a call; with another one
leave out ``tool_choice``, and it decides itself. The demo's may write whitespace without end where the server was not
started with ``--constrained-json-disable-any-whitespace``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


def get_weather(city: str) -> str:
    """What the tool says: JSON."""
    city = city.strip()  # a grammar of calls lets whitespace follow a text
    return json.dumps({"city": city, "degrees": {"Paris": 14, "Rome": 22}[city]})


def converse(url: str, **fields: Any) -> list[Any]:
    """Ask, let the model call the tool, return its result, and take the answer.

    Args:
        fields: added to both requests, such as ``extra_body``.

    Returns:
        The messages: question, call, result, answer.
    """
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    settings: dict[str, Any] = {"model": "default", "tools": [WEATHER], "max_tokens": 300, "temperature": 0} | fields
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Rome?"}]
    required: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.create(messages=messages, **required, **settings).choices[0].message
    if not called.tool_calls:
        raise RuntimeError(f"expected a tool call, found {called.content!r}; where it is cut off, raise max_tokens")
    messages.append({"role": "assistant", "tool_calls": [call.model_dump() for call in called.tool_calls]})
    for call in called.tool_calls:
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(messages=messages, **{**settings, "max_tokens": 16}).choices[0].message
    messages.append({"role": "assistant", "content": answer.content})
    for message in messages:
        print(json.dumps(message, ensure_ascii=False))
    return messages


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/function_calling.py URL")
    converse(sys.argv[1])
