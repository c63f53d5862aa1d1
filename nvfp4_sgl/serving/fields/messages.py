"""Fields of ``/v1/messages`` and its ``/count_tokens``: SGLang's ``AnthropicMessagesRequest`` and what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nvfp4_sgl.files import shown
from nvfp4_sgl.serving.fields.checks import (
    MAX_TOKENS,
    Check,
    array_of,
    boolean,
    either,
    integer,
    json_object,
    one_of,
    text,
)
from nvfp4_sgl.serving.fields.field import Field, Table, offered, refused, without_effect
from nvfp4_sgl.serving.fields.generate import GENERATE, SAMPLING_PARAMS
from nvfp4_sgl.serving.fields.limits import MAX_STOPS
from nvfp4_sgl.serving.fields.objects import structure, tagged
from nvfp4_sgl.serving.fields.openai import (
    BUDGET,
    CACHE_CONTROL,
    EMPTY_ARRAY,
    NO_DEFERRED,
    NO_TIERS,
    NOT_IDENTIFIED,
    OF_OTHER_SERVERS,
    TEXT_ONLY,
)

NOT_KEPT = "not offered: nothing is stored; send all messages of the conversation"
NOT_RUN = "run by Anthropic's servers, or without a schema that the model could be told; send a custom tool"
IN_THE_TEXT = "the prompt has the text"
BILLING = "billing does not exist here"

TEXT_BLOCK: Table = {
    "text": offered(text(), required=True),
    "cache_control": CACHE_CONTROL,
    "citations": without_effect(array_of(json_object()), IN_THE_TEXT),
}

SEARCH_RESULT: Table = {
    "source": offered(either(text(), json_object()), required=True),
    "title": offered(text(), required=True),
    "content": offered(array_of(tagged({"text": TEXT_BLOCK}), least=1), required=True),
    "citations": without_effect(json_object(), "answers cite nothing"),
    "cache_control": CACHE_CONTROL,
}

NO_TOOLSETS = refused("tools are sent one by one; leave it out")

NO_BLOCKS = {
    **dict.fromkeys(("image", "document", "container_upload"), TEXT_ONLY),
    "tool_reference": NO_DEFERRED,
    "redacted_thinking": "encrypted by another server, and so unreadable; leave it out",
    "compaction": NOT_KEPT,
}

TOOL_RESULT: Table = {
    "tool_use_id": offered(text(1), required=True),
    "content": offered(
        either(text(), array_of(tagged({"text": TEXT_BLOCK, "search_result": SEARCH_RESULT}, others=NO_BLOCKS)))
    ),
    "toolset_name": NO_TOOLSETS,
    "is_error": without_effect(boolean(), "the model's format has no mark of failure; the content says what failed"),
    "cache_control": CACHE_CONTROL,
}

TOOL_USE: Table = {
    "id": offered(text(1), required=True),
    "name": offered(text(1), required=True),
    "input": offered(json_object(), null=False),
    "toolset_name": NO_TOOLSETS,
    "caller": without_effect(json_object(), "every tool is called by the model"),
    "cache_control": CACHE_CONTROL,
}

THINKING_BLOCK: Table = {
    "thinking": offered(text(), required=True),
    "signature": without_effect(text(), "reasoning is read as it is sent"),
}

TEXT_BLOCKS = array_of(tagged({"text": TEXT_BLOCK}, others=NO_BLOCKS))

USER_BLOCKS = {"text": TEXT_BLOCK, "tool_result": TOOL_RESULT, "search_result": SEARCH_RESULT}

MESSAGE = tagged(
    {
        "user": {
            "content": offered(either(text(), array_of(tagged(USER_BLOCKS, others=NO_BLOCKS), least=1)), required=True)
        },
        "assistant": {
            "content": offered(
                either(
                    text(),
                    array_of(
                        tagged(
                            {"text": TEXT_BLOCK, "thinking": THINKING_BLOCK, "tool_use": TOOL_USE},
                            others=NO_BLOCKS,
                        )
                    ),
                ),
                required=True,
            )
        },
        "system": {"content": offered(either(text(), TEXT_BLOCKS), required=True)},
    },
    "role",
)

CUSTOM: Table = {
    "name": offered(text(1), required=True),
    "description": offered(text()),
    "input_schema": offered(json_object(), required=True),
    "strict": offered(boolean(), null=False),
    "defer_loading": refused(NO_DEFERRED, harmless=one_of(False)),
    "eager_input_streaming": without_effect(boolean(), "arguments are streamed as they are written"),
    "input_examples": without_effect(array_of(json_object()), "the model's format has schemas only"),
    "allowed_callers": refused("every tool is called by the model; leave it out", harmless=one_of(["direct"])),
    "cache_control": CACHE_CONTROL,
}

TOOL = tagged({"custom": CUSTOM}, default="custom")

PARALLEL: Table = {"disable_parallel_tool_use": offered(boolean(), null=False)}

TOOL_CHOICE = tagged(
    {"auto": PARALLEL, "any": PARALLEL, "tool": {**PARALLEL, "name": offered(text(1), required=True)}, "none": {}}
)


def demanded(check: Check) -> Field:
    """A bound that SGLang demands and does not keep."""
    return replace(without_effect(check, "bounded by max_tokens alone"), required=True, null=False)


DISPLAY = without_effect(one_of("summarized", "omitted"), "reasoning is sent as it is written")

THINKING = tagged(
    {
        "enabled": {
            "budget_tokens": demanded(integer(1024, MAX_TOKENS)),
            "display": DISPLAY,
        },
        "adaptive": {"display": DISPLAY},
        "disabled": {},
    }
)

OUTPUT_CONFIG: Table = {
    "effort": offered(one_of("minimal", "low", "medium", "high", "xhigh", "max")),
    "format": offered(tagged({"json_schema": {"schema": offered(json_object(), required=True)}})),
    "task_budget": without_effect(
        tagged(
            {
                "tokens": {
                    "total": demanded(integer(1, 2**53)),
                    "remaining": without_effect(integer(0, 2**53), "bounded by max_tokens alone"),
                }
            }
        ),
        "a hint to Anthropic's models; max_tokens is the bound",
    ),
}

COUNTED: Table = {
    "model": offered(text(1), required=True),
    "messages": offered(array_of(MESSAGE, least=1), required=True),
    "system": offered(either(text(), TEXT_BLOCKS)),
    "tools": offered(array_of(TOOL)),
    "tool_choice": offered(TOOL_CHOICE),
    "thinking": offered(THINKING),
    "output_config": offered(structure(OUTPUT_CONFIG)),
    "betas": without_effect(array_of(text()), "names of what Anthropic's servers try out"),
    "cache_control": CACHE_CONTROL,
    "context_management": without_effect(
        json_object(), "spares tokens by leaving out parts of the history; the whole history is read"
    ),
    "speed": refused(NO_TIERS + "; leave it out", harmless=one_of("standard")),
    "mcp_servers": refused("the server calls no other servers; send custom tools", harmless=EMPTY_ARRAY),
    "user_profile_id": without_effect(text(), NOT_IDENTIFIED),
    "workspace_id": without_effect(text(), BILLING),
    "compaction": refused("not implemented; ask for a summary in a message"),
    "container": refused("the server runs no code; leave it out"),
    "output_format": refused("an older name; send output_config.format"),
    "thread": refused(NOT_KEPT),
    "functions": refused("OpenAI's word; send tools"),
}
"""Fields of both paths."""

MESSAGES: Table = {
    **COUNTED,
    **{name: GENERATE[name] for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank")},
    **{name: SAMPLING_PARAMS[name] for name in ("temperature", "top_p", "top_k")},
    "disagg_prefill_dp_rank": GENERATE["disagg_prefill_dp_rank"],
    "prompt_logprobs": OF_OTHER_SERVERS["prompt_logprobs"],
    "max_tokens": offered(BUDGET, required=True),
    "stop_sequences": offered(array_of(text(1), most=MAX_STOPS)),
    "stream": offered(boolean()),
    "metadata": without_effect(json_object(), "labels for the client's own use"),
    "service_tier": without_effect(one_of("auto", "standard_only"), NO_TIERS),
    "inference_geo": refused("the server is where it is; leave it out"),
    "diagnostics": without_effect(json_object(), "asks Anthropic's servers about their caches"),
    "billing_policy": without_effect(json_object(), BILLING),
    "fallback_credit_token": refused(BILLING + "; leave it out"),
    "fallbacks": refused("the server has one model; leave it out", harmless=one_of("default")),
}


def choice_fault(body: Mapping[str, Any]) -> str | None:
    """Why a forced call cannot be made, or ``None``; SGLang would refuse it with a traceback in its log."""
    choice, tools = body.get("tool_choice") or {}, body.get("tools") or []
    if choice.get("type") not in ("any", "tool"):
        return None
    if not tools:
        return f"tools: missing; expected at least one with a tool_choice of type {choice['type']!r}"
    name = choice.get("name")
    if name is None or any(tool["name"] == name for tool in tools):
        return None
    return f"tool_choice.name: found {shown(name)}; expected the name of one of the tools"
