"""Rewrites bodies, whose fields the tables have checked, into the words that SGLang reads.

Clients send one wish by several names, some of which SGLang ignores or answers with status 500. Fields that cannot all
be followed are a :class:`.thinking.Contradiction`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nvfp4_sgl.serving.fields.checks import INT64
from nvfp4_sgl.serving.fields.thinking import Body, Contradiction, with_one_switch

DEFAULT_MODEL = "default"
"""SGLang's name for the one model that it serves."""


def translate_chat(body: Body) -> Body:
    """``/v1/chat/completions``."""
    body = with_one_switch(without_nulls(body))
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise Contradiction("top_logprobs: send logprobs true with it")
    budgets = [body[name] for name in ("max_tokens", "max_completion_tokens") if name in body]
    if len(set(budgets)) > 1:
        raise Contradiction(f"max_completion_tokens: differs from max_tokens, {budgets[0]}; send one of them")
    if "response_format" in body:
        body["response_format"] = with_schema(body["response_format"])
    return with_continuation(body)


def translate_completion(body: Body) -> Body:
    """``/v1/completions``."""
    body = without_nulls(body)
    n = body.get("n", 1)
    if body.pop("best_of", n) != n:
        raise Contradiction("best_of: not implemented beyond n; leave it out, or send n and choose")
    if "response_format" in body:
        body["response_format"] = with_schema(body["response_format"])
    return body


def translate_response(body: Body) -> Body:
    """``/v1/responses``: the answer says that nothing is stored."""
    body = with_one_switch(without_nulls(body))
    if body.get("top_logprobs") and "message.output_text.logprobs" not in body.get("include", ()):
        raise Contradiction("top_logprobs: send include with 'message.output_text.logprobs' as well")
    body.pop("stream_options", None)
    if "tools" in body:
        body["tools"] = [without_nulls(tool) for tool in body["tools"]]
    return {"model": DEFAULT_MODEL, **body, "store": False}


TRANSLATIONS: Mapping[str, Callable[[Body], Body]] = {
    "/v1/chat/completions": translate_chat,
    "/v1/completions": translate_completion,
    "/v1/responses": translate_response,
}
"""By path; the bodies of other paths go on as they came."""


def without_idle_seed(body: Any) -> Any:
    """A chat or a completion of temperature 0 without its ``seed``, which would change nothing: no token is drawn."""
    seed = body.get("seed") if isinstance(body, dict) else None
    idle = type(seed) is int and abs(seed) <= INT64 and body.get("temperature") == 0
    return {name: value for name, value in body.items() if name != "seed"} if idle else body


def without_nulls(body: Body) -> Body:
    """``body`` without fields that are ``null``, which leaves them out."""
    return {name: value for name, value in body.items() if value is not None}


def with_schema(response_format: Any) -> Any:
    """A JSON schema beside ``type``, as some clients send it, moved to where OpenAI's is."""
    if response_format["type"] == "structural_tag":
        legacy = "structures" in response_format and "triggers" in response_format
        if legacy == ("format" in response_format):
            raise Contradiction("response_format: expected format, or structures and triggers")
    if response_format["type"] != "json_schema":
        return response_format
    schema, nested = response_format.get("schema"), response_format.get("json_schema")
    if (schema is None) == (nested is None):
        found = "both" if schema is not None else "neither"
        raise Contradiction(f"response_format: found {found} of json_schema and schema; expected json_schema")
    return {"type": "json_schema", "json_schema": nested or {"name": "Schema", "schema": schema}}


def with_continuation(body: Body) -> Body:
    """``prefix`` of the last message, DeepSeek's word, as ``continue_final_message``; all messages complete."""
    messages = [complete(message) for message in body["messages"]]
    wanted = [place for place, message in enumerate(messages) if message.pop("prefix", False)]
    if wanted and wanted != [len(messages) - 1]:
        raise Contradiction(f"messages[{wanted[0]}].prefix: only the last message is continued; leave it out of others")
    if wanted or body.get("continue_final_message"):
        last = messages[-1]
        if last["role"] != "assistant" or not isinstance(last.get("content"), str):
            raise Contradiction(
                "continue_final_message: expected a last message of the assistant, with a string as content"
            )
        body["continue_final_message"] = True
    return {**body, "messages": messages}


def complete(message: Body) -> Body:
    """A message for DeepSeek's encoder: ``reasoning`` by its other name, types of tools and calls, nothing ``null``."""
    message = without_nulls(message)
    for name in ("tools", "tool_calls"):
        if name in message:
            message[name] = [{"type": "function", **without_nulls(one)} for one in message[name]]
    reasoning = message.pop("reasoning", None)
    if reasoning is not None and message.setdefault("reasoning_content", reasoning) != reasoning:
        raise Contradiction("messages: reasoning and reasoning_content differ; send one of them")
    return message
