"""Fields of ``/v1/responses``: SGLang's ``ResponsesRequest``."""

from __future__ import annotations

from nvfp4_sgl.serving.fields.checks import MAX_TOKENS, array_of, boolean, either, integer, json_object, one_of, text
from nvfp4_sgl.serving.fields.field import Table, offered, refused, translated, without_effect
from nvfp4_sgl.serving.fields.objects import structure, tagged
from nvfp4_sgl.serving.fields.openai import (
    BUDGET,
    CACHE_CONTROL,
    FUNCTION,
    NO_DEFERRED,
    NO_OBFUSCATION,
    NO_VERBOSITY,
    NOT_STORED,
    OF_ONE_USER,
    ORDINARY_SAMPLING,
    REQUEST,
    TEXT_ONLY,
    THINKING,
    TIERS,
    VERBOSITIES,
    arguments,
)
from nvfp4_sgl.serving.fields.values import request_name

NOT_RUN = "run by OpenAI's servers alone; send a tool of type 'function' or 'custom'"
NOT_KEPT = "not offered: nothing is stored; send all items of the conversation as input"
SERVERS_OWN = "a name that the sender gave the item"

STATUS = one_of("in_progress", "completed", "incomplete")

NAMED_ITEM: Table = {
    "id": without_effect(text(), SERVERS_OWN),
    "status": without_effect(STATUS, "items are read as they are"),
}

TEXT_PART: Table = {
    "text": offered(text(), required=True),
    "annotations": without_effect(array_of(json_object()), "the prompt has the text"),
    "logprobs": without_effect(array_of(json_object()), "the prompt has the text"),
    "cache_control": CACHE_CONTROL,
}

PARTS = array_of(
    tagged(
        {"input_text": TEXT_PART, "output_text": TEXT_PART, "text": TEXT_PART},
        others=dict.fromkeys(("input_image", "input_file", "input_audio", "image_url", "refusal"), TEXT_ONLY),
    )
)

ITEM_MESSAGE: Table = {
    **NAMED_ITEM,
    "role": offered(one_of("user", "assistant", "system", "developer"), required=True),
    "content": offered(either(text(), PARTS), required=True),
    "phase": without_effect(one_of("commentary", "final_answer"), "the model's format has no phases"),
    "name": without_effect(text(), "the model's format has no names of speakers"),
    "end_turn": without_effect(boolean(), "turns end where the next item begins"),
}

OUTPUT: Table = {
    **NAMED_ITEM,
    "call_id": offered(text(1), required=True),
    "output": offered(either(text(), PARTS), required=True),
}

CALL: Table = {
    **NAMED_ITEM,
    "call_id": offered(text(1), required=True),
    "name": offered(text(1), required=True),
    "namespace": refused("namespaces of tools are not implemented; send tools of type 'function'"),
}

REASONING_TEXT = array_of(
    tagged({kind: {"text": offered(text(), required=True)} for kind in ("summary_text", "reasoning_text", "text")})
)

ITEM = tagged(
    {
        "message": ITEM_MESSAGE,
        "function_call": {**CALL, "arguments": offered(arguments(), required=True)},
        "function_call_output": OUTPUT,
        "custom_tool_call": {**CALL, "input": offered(text(), required=True)},
        "custom_tool_call_output": OUTPUT,
        "reasoning": {
            **NAMED_ITEM,
            "summary": offered(REASONING_TEXT),
            "content": offered(REASONING_TEXT),
            "encrypted_content": offered(text()),
        },
    },
    default="message",
    others={"item_reference": NOT_KEPT},
)

SERVERS_TOOL: Table = {
    name: without_effect(check, "the model is not told of the tool, since nothing here runs it")
    for name, check in {
        "description": text(),
        "execution": text(),
        "external_web_access": boolean(),
        "filters": json_object(),
        "parameters": json_object(),
        "search_content_types": array_of(text()),
        "search_context_size": text(),
        "user_location": json_object(),
    }.items()
}
"""A tool that OpenAI's clients send with every request, and that OpenAI's servers run."""

TOOL = tagged(
    {
        "function": {**FUNCTION, "defer_loading": refused(NO_DEFERRED, harmless=one_of(False))},
        "custom": {
            "name": offered(text(1), required=True),
            "description": offered(text()),
            "format": offered(json_object()),
        },
        "web_search": SERVERS_TOOL,
        "web_search_preview": SERVERS_TOOL,
        "tool_search": SERVERS_TOOL,
    },
    others=dict.fromkeys(
        (
            "code_interpreter",
            "computer_use_preview",
            "file_search",
            "image_generation",
            "local_shell",
            "mcp",
            "namespace",
            "shell",
        ),
        NOT_RUN,
    ),
)

FORMAT = tagged(
    {
        "text": {},
        "json_object": {},
        "json_schema": {
            "name": offered(text(1), required=True),
            "description": offered(text()),
            "schema": offered(json_object(), required=True),
            "strict": offered(boolean()),
        },
    }
)

TEXT: Table = {
    "format": offered(FORMAT),
    "verbosity": without_effect(VERBOSITIES, NO_VERBOSITY),
}

REASONING: Table = {
    "effort": offered(one_of(*TIERS)),
    "summary": offered(one_of("auto", "concise", "detailed")),
    "generate_summary": translated(one_of("auto", "concise", "detailed"), "summary, its newer name"),
}

INCLUDES = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
)
"""What an answer may include. All but the last two belong to tools and pictures, of which an answer has none."""

CHOSEN = {"name": offered(text(1), required=True)}

RESPONSE: Table = {
    **REQUEST,
    **ORDINARY_SAMPLING,
    **OF_ONE_USER,
    **THINKING,
    "metadata": offered(json_object()),
    "model": offered(text()),
    "input": offered(either(text(1), array_of(ITEM, least=1)), required=True),
    "instructions": offered(text()),
    "max_output_tokens": offered(BUDGET),
    "tools": offered(array_of(TOOL)),
    "tool_choice": offered(
        either(
            one_of("auto", "none", "required"),
            tagged({"function": CHOSEN, "custom": CHOSEN}, others={"web_search": NOT_RUN}),
        )
    ),
    "parallel_tool_calls": offered(boolean()),
    "max_tool_calls": without_effect(integer(0, MAX_TOKENS), "bounds calls of tools that the server runs: none"),
    "reasoning": offered(structure(REASONING)),
    "text": offered(structure(TEXT)),
    "include": offered(array_of(one_of(*INCLUDES))),
    "top_logprobs": offered(integer(0, MAX_TOKENS)),
    "stream": offered(boolean()),
    "stream_options": without_effect(
        structure(
            {
                "include_obfuscation": without_effect(boolean(), NO_OBFUSCATION),
                "include_usage": without_effect(boolean(), "the last event always has the usage"),
            }
        ),
        "the last event always has the usage",
    ),
    "store": without_effect(boolean(), NOT_STORED + "; the answer says so"),
    "truncation": without_effect(one_of("auto", "disabled"), "an input that is too long is refused, never cut"),
    "background": refused(NOT_KEPT, harmless=one_of(False)),
    "conversation": refused(NOT_KEPT),
    "previous_response_id": refused(NOT_KEPT),
    "prompt": refused("not offered: prompts are not stored here; send instructions and input"),
    "client_metadata": without_effect(json_object(), "labels for the client's own use"),
    "reasoning_effort": refused("a field of chats; send reasoning.effort"),
    "max_tokens": refused("a field of chats; send max_output_tokens"),
    "messages": refused("a field of chats; send input"),
    "response_format": refused("a field of chats; send text.format"),
    # SGLang's own
    "priority": refused("SGLang 0.5.23 does not read it for responses; send a chat", harmless=one_of(0)),
    "request_id": offered(request_name()),
    "extra_key": offered(text()),
    "cache_salt": offered(text()),
}
