"""Every field of OpenAI's and Anthropic's bodies has a verdict: those of SGLang's classes and the clients' types."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from nvfp4_sgl.serving import handlers, requests
from nvfp4_sgl.serving.fields import chat, messages, openai, responses
from nvfp4_sgl.serving.fields.bodies import BODIES, body_fault, checked_body
from nvfp4_sgl.serving.fields.chat import CHAT
from nvfp4_sgl.serving.fields.completions import COMPLETION
from nvfp4_sgl.serving.fields.field import Table, Verdict, object_fault
from nvfp4_sgl.serving.fields.messages import COUNTED, MESSAGES
from nvfp4_sgl.serving.fields.objects import samples
from nvfp4_sgl.serving.fields.responses import RESPONSE

PROTOCOL, ANTHROPIC = "sglang.srt.entrypoints.openai.protocol:", "sglang.srt.entrypoints.anthropic.protocol:"
CHAT_TYPES, RESPONSE_TYPES = "openai.types.chat:", "openai.types.responses:"

MESSAGE: Table = {**chat.INSTRUCTION, **chat.USER, **chat.ASSISTANT, **chat.TOOL_RESULT}
ITEM: Table = {**responses.ITEM_MESSAGE, **responses.OUTPUT, **responses.CALL, **responses.TEXT_PART}

SGLANG: dict[str, Table] = {
    f"{PROTOCOL}ChatCompletionRequest": CHAT,
    f"{PROTOCOL}CompletionRequest": COMPLETION,
    f"{PROTOCOL}ResponsesRequest": RESPONSE,
    f"{PROTOCOL}StreamOptions": openai.STREAM_OPTIONS,
    f"{PROTOCOL}JsonSchemaResponseFormat": openai.SCHEMA_FORMAT,
    f"{PROTOCOL}ResponseFormat": openai.LOOSE_SCHEMA,
    f"{PROTOCOL}LegacyStructuralTagResponseFormat": openai.LEGACY_TAG,
    f"{PROTOCOL}StructuresResponseFormat": openai.STRUCTURE,
    f"{PROTOCOL}Tool": chat.TOOL,
    f"{PROTOCOL}Function": {**openai.FUNCTION, "defer_loading": chat.DEFERRED},
    f"{PROTOCOL}ToolCall": chat.TOOL_CALL,
    f"{PROTOCOL}FunctionResponse": chat.FUNCTION_CALL,
    f"{PROTOCOL}ToolChoice": chat.NAMED,
    f"{PROTOCOL}ChatCompletionMessageGenericParam": MESSAGE,
    f"{PROTOCOL}ChatCompletionMessageUserParam": chat.USER,
    f"{PROTOCOL}ChatCompletionMessageContentTextPart": chat.TEXT_PART,
    f"{PROTOCOL}ChatCompletionMessageContentThinkingPart": chat.REASONING_PART,
    f"{PROTOCOL}ResponseReasoningParam": responses.REASONING,
    f"{ANTHROPIC}AnthropicMessagesRequest": MESSAGES,
    f"{ANTHROPIC}AnthropicCountTokensRequest": COUNTED,
    f"{ANTHROPIC}AnthropicOutputConfig": messages.OUTPUT_CONFIG,
    f"{ANTHROPIC}AnthropicCustomTool": messages.CUSTOM,
    f"{ANTHROPIC}TextBlock": messages.TEXT_BLOCK,
    f"{ANTHROPIC}ToolUseBlock": messages.TOOL_USE,
    f"{ANTHROPIC}SearchResultBlock": messages.SEARCH_RESULT,
    f"{ANTHROPIC}ThinkingBlock": messages.THINKING_BLOCK,
}
"""SGLang's pydantic classes."""

CLIENTS: dict[str, Table] = {
    "openai.types.chat.completion_create_params:CompletionCreateParamsBase": CHAT,
    "openai.types.completion_create_params:CompletionCreateParamsBase": COMPLETION,
    "openai.types.responses.response_create_params:ResponseCreateParamsBase": RESPONSE,
    "openai.types.responses.response_create_params:StreamOptions": {"include_obfuscation": CHAT["stream"]},
    "openai.types.shared_params:Reasoning": responses.REASONING,
    "openai.types.shared_params:FunctionDefinition": openai.FUNCTION,
    f"{CHAT_TYPES}ChatCompletionStreamOptionsParam": openai.STREAM_OPTIONS,
    f"{CHAT_TYPES}ChatCompletionSystemMessageParam": chat.INSTRUCTION,
    f"{CHAT_TYPES}ChatCompletionDeveloperMessageParam": chat.INSTRUCTION,
    f"{CHAT_TYPES}ChatCompletionUserMessageParam": chat.USER,
    f"{CHAT_TYPES}ChatCompletionAssistantMessageParam": chat.ASSISTANT,
    f"{CHAT_TYPES}ChatCompletionToolMessageParam": chat.TOOL_RESULT,
    f"{CHAT_TYPES}ChatCompletionContentPartTextParam": chat.TEXT_PART,
    f"{CHAT_TYPES}ChatCompletionMessageFunctionToolCallParam": chat.TOOL_CALL,
    f"{CHAT_TYPES}ChatCompletionFunctionToolParam": chat.TOOL,
    f"{RESPONSE_TYPES}ResponseTextConfigParam": responses.TEXT,
    f"{RESPONSE_TYPES}FunctionToolParam": openai.FUNCTION,
    f"{RESPONSE_TYPES}WebSearchToolParam": responses.SERVERS_TOOL,
    f"{RESPONSE_TYPES}EasyInputMessageParam": responses.ITEM_MESSAGE,
    "anthropic.types.message_create_params:MessageCreateParamsBase": MESSAGES,
    "anthropic.types.beta.message_create_params:MessageCreateParamsBase": MESSAGES,
    "anthropic.types.message_count_tokens_params:MessageCountTokensParams": COUNTED,
    "anthropic.types:TextBlockParam": messages.TEXT_BLOCK,
    "anthropic.types:ToolUseBlockParam": messages.TOOL_USE,
    "anthropic.types:ToolResultBlockParam": messages.TOOL_RESULT,
    "anthropic.types:ThinkingBlockParam": messages.THINKING_BLOCK,
    "anthropic.types:SearchResultBlockParam": messages.SEARCH_RESULT,
    "anthropic.types:OutputConfigParam": messages.OUTPUT_CONFIG,
    "anthropic.types.beta:BetaOutputConfigParam": messages.OUTPUT_CONFIG,
    "anthropic.types:ToolParam": messages.CUSTOM,
    "anthropic.types.beta:BetaToolParam": messages.CUSTOM,
}
"""The parameters of the clients' methods and what is in them."""

TAGS = {"role", "type"}
"""Fields that choose a table (:func:`nvfp4_sgl.serving.fields.objects.tagged`)."""

SET_BY_VALIDATORS = {"key_order"}
"""Fields that SGLang's classes fill themselves, whatever a client sends."""


def names_of(model: Any) -> set[str]:
    """Fields of a pydantic class, by the names of JSON."""
    return {field.alias or name for name, field in model.model_fields.items()} - SET_BY_VALIDATORS - TAGS


@pytest.mark.parametrize("path", SGLANG)
def test_every_field_of_sglang_has_its_verdict(path: str) -> None:
    assert not names_of(resolve_name(path)) - set(SGLANG[path])


@pytest.mark.parametrize(
    "path", [path for path in SGLANG if path.split(":")[1].endswith(("Request", "StreamOptions", "OutputConfig"))]
)
def test_nothing_is_offered_that_sglang_does_not_read(path: str) -> None:
    known = names_of(resolve_name(path))
    assert not {name for name, field in SGLANG[path].items() if field.verdict is Verdict.OFFERED} - known


@pytest.mark.parametrize("path", CLIENTS)
def test_every_parameter_of_the_clients_has_its_verdict(path: str) -> None:
    assert not set(typing.get_type_hints(resolve_name(path))) - TAGS - set(CLIENTS[path])


@pytest.mark.parametrize(
    "table", [CHAT, COMPLETION, RESPONSE, MESSAGES, COUNTED], ids=["chat", "text", "re", "me", "n"]
)
def test_samples_of_bodies(table: Table) -> None:
    taken, refused = samples(table)
    assert all(object_fault(table, body) is None for body in taken)
    assert all(object_fault(table, body) is not None for body in refused)


HELLO = [{"role": "user", "content": "hi"}]

TRANSLATED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "enable_thinking": ("chat/completions", {"enable_thinking": True}, {"chat_template_kwargs": {"thinking": True}}),
    "enable_thinking in the template's arguments": (
        "chat/completions",
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
    ),
    "DeepSeek's thinking": (
        "chat/completions",
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"thinking": False}},
    ),
    "OpenRouter's reasoning": (
        "chat/completions",
        {"reasoning": {"enabled": True, "effort": "low"}},
        {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "low"},
    ),
    "effort in the template's arguments": (
        "responses",
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        {"reasoning": {"effort": "low"}, "model": "default", "store": False},
    ),
    "nothing at all": ("chat/completions", {"stop": None, "tools": None}, {}),
    "a schema beside its type": (
        "chat/completions",
        {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "Schema", "schema": {"type": "object"}}}},
    ),
    "best_of that is n": ("completions", {"best_of": 2, "n": 2}, {"n": 2}),
    "a seed that draws nothing": ("completions", {"seed": 1234, "temperature": 0}, {"temperature": 0}),
    "a response's defaults": ("responses", {"store": True}, {"model": "default", "store": False}),
}


MINIMAL: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"model": "x", "messages": HELLO, "max_tokens": 3},
}
"""The smallest body of each path below ``/v1``."""


def checked(path: str, body: Mapping[str, Any]) -> tuple[str | None, Any]:
    """Why the body of ``/v1/{path}`` is refused, or ``None``; and what SGLang gets."""
    fault, rewritten = checked_body(f"/v1/{path}", json.dumps({**MINIMAL[path], **body}).encode())
    return fault, json.loads(rewritten)


@pytest.mark.parametrize("name", TRANSLATED)
def test_translated(name: str) -> None:
    path, sent, read = TRANSLATED[name]
    assert checked(path, sent) == (None, {**MINIMAL[path], **read})


def test_prefix_continues_the_last_message() -> None:
    answer = {"role": "assistant", "content": "a", "prefix": True, "reasoning": "b"}
    _, body = checked("chat/completions", {"messages": [*HELLO, answer]})
    assert body["continue_final_message"] is True
    assert body["messages"][-1] == {"role": "assistant", "content": "a", "reasoning_content": "b"}


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_null_leaves_a_field_out(path: str) -> None:
    fields = {name: None for name, field in BODIES[f"/v1/{path}"].items() if not field.required}
    fault, body = checked(path, fields)
    assert fault is None and (path == "messages" or None not in body.values())


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a seed": ("completions", {"seed": 1234, "temperature": 0.5}, "seed: not honoured"),
    "two switches": ("chat/completions", {"enable_thinking": True, "thinking": False}, "enable_thinking: found True"),
    "two efforts": (
        "chat/completions",
        {"reasoning_effort": "low", "reasoning": {"effort": "max"}},
        "reasoning.effort",
    ),
    "no effort to think": ("chat/completions", {"thinking": True, "reasoning_effort": "none"}, "'none'"),
    "two bounds": ("chat/completions", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    "top_logprobs alone": ("chat/completions", {"top_logprobs": 3}, "send logprobs true"),
    "a response's top_logprobs alone": ("responses", {"top_logprobs": 3}, "top_logprobs: send include"),
    "best_of": ("completions", {"best_of": 3}, "best_of: not implemented"),
    "suffix": ("completions", {"suffix": "x"}, "suffix: not implemented"),
    "functions": ("chat/completions", {"functions": [{"name": "f"}]}, "functions: replaced by tools"),
    "function_call": ("chat/completions", {"function_call": {"name": "f"}}, "function_call: replaced by tools"),
    "echo": ("chat/completions", {"echo": True}, "echo: "),
    "prompt_logprobs": (
        "chat/completions",
        {"prompt_logprobs": 1},
        "prompt_logprobs: not offered here; send /generate",
    ),
    "prompt_logprobs of a text": ("completions", {"prompt_logprobs": 0}, "prompt_logprobs: not offered here"),
    "a switch that is text": (
        "chat/completions",
        {"chat_template_kwargs": {"thinking": "no"}},
        "expected true or false",
    ),
    "another template's switch": ("chat/completions", {"chat_template_kwargs": {"tinking": True}}, "unknown field"),
    "half a structural tag": (
        "completions",
        {"response_format": {"type": "structural_tag", "triggers": ["x"]}},
        "response_format: expected format, or structures and triggers",
    ),
    "no schema": ("chat/completions", {"response_format": {"type": "json_schema"}}, "found neither of json_schema and"),
    "a forced tool of the server": ("responses", {"tool_choice": {"type": "web_search"}}, "tool_choice"),
    "a tool that nobody runs": (
        "responses",
        {"tools": [{"type": "file_search"}]},
        "tools[0].type: 'file_search' is run by",
    ),
    "Anthropic's own tool": ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    "a picture": (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "'image' is not offered",
    ),
    "a picture in a result": (
        "messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages[0].content[0].content[0].type",
    ),
    "a system that is no text": ("messages", {"system": [{"type": "image"}]}, "system[0].type"),
    "an empty stop sequence": ("messages", {"stop_sequences": [""]}, "stop_sequences[0]"),
    "a prefix that is not last": (
        "chat/completions",
        {"messages": [{"role": "assistant", "content": "a", "prefix": True}, *HELLO]},
        "messages[0].prefix",
    ),
    "nothing to continue": ("chat/completions", {"continue_final_message": True}, "continue_final_message"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    path, sent, part = REFUSED[name]
    assert part in (checked(path, sent)[0] or "")


ROW = re.compile(r"^\| `(/v1/[a-z/_]+)` \|([^|]*)\|([^|]*)\|$", re.MULTILINE)


def test_the_documented_fields() -> None:
    """The page lists all fields of each path that are translated, and all that have no effect."""
    text = (Path(__file__).parents[2] / "docs/compatibility.md").read_text()
    rows = {path: (translated, idle) for path, translated, idle in ROW.findall(text)}
    assert set(rows) >= {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    for path, cells in rows.items():
        for verdict, cell in zip((Verdict.TRANSLATED, Verdict.NO_EFFECT), cells, strict=True):
            names = {name for name, field in BODIES[path].items() if field.verdict is verdict}
            assert names == set(re.findall("`([a-z_]+)`", cell)), (path, verdict)


def test_a_response_has_the_tokens_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And OpenAI's default temperature; other architectures keep SGLang's rules."""
    request_type = resolve_name(f"{PROTOCOL}ResponsesRequest")
    request, original = request_type(input="x", max_output_tokens=3), request_type.to_sampling_params
    for ours, expected in ((True, (3, 1.0)), (False, (1, 0.7))):
        for module in (handlers, requests):
            monkeypatch.setattr(module, "serves_our_model", lambda ours=ours: ours)
        params = handlers.responses_sampling(original, request, None, {})
        assert (params["max_new_tokens"], params["temperature"]) == expected
    monkeypatch.setattr(handlers, "serves_our_model", lambda: True)
    assert handlers.responses_sampling(original, request_type(input="x"), None, None)["max_new_tokens"] is None


def test_arguments_of_a_call_have_a_bound() -> None:
    """SGLang parses them, and Python's recursion ends in status 500."""
    where = "messages[0].tool_calls[0].function.arguments: found objects and arrays more than 120 deep"
    for levels in (120, 121):
        function = {"name": "f", "arguments": '{"a":' * levels + "1" + "}" * levels}
        calling = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
        fault, _ = checked("chat/completions", {"messages": [calling]})
        assert (fault is None) if levels == 120 else (where in (fault or ""))


def test_a_body_that_is_no_json() -> None:
    assert "body: expected JSON" in (body_fault("/v1/messages", b'{"model": ') or "")
