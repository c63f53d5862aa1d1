"""Fields of ``/v1/chat/completions``: SGLang's ``ChatCompletionRequest``."""

from __future__ import annotations

from nvfp4_sgl.serving.fields.checks import (
    MAX_TOKENS,
    array_of,
    boolean,
    either,
    integer,
    json_object,
    one_of,
    text,
    token_ids,
)
from nvfp4_sgl.serving.fields.field import Table, offered, refused, translated, without_effect
from nvfp4_sgl.serving.fields.generate import NO_PICTURES, NOT_IMPLEMENTED
from nvfp4_sgl.serving.fields.objects import structure, tagged
from nvfp4_sgl.serving.fields.openai import (
    BUDGET,
    CACHE_CONTROL,
    EMPTY_ARRAY,
    FUNCTION,
    GENERATION,
    NO_DEFERRED,
    NO_VERBOSITY,
    NOT_STORED,
    OF_ONE_USER,
    OFF,
    TEXT_ONLY,
    THINKING,
    TIERS,
    VERBOSITIES,
    arguments,
)
from nvfp4_sgl.serving.fields.values import request_name

NO_FUNCTIONS = "replaced by tools and tool_choice, whose answers have tool_calls; send those"
NO_NAMES = "the model's format has no names of speakers"
BESIDE_THE_TEXT = "what another server said beside the text; the prompt has the text"

TEXT_PART: Table = {
    "text": offered(text(), required=True),
    "cache_control": CACHE_CONTROL,
    "annotations": without_effect(array_of(json_object()), BESIDE_THE_TEXT),
}

REASONING_PART: Table = {
    "thinking": offered(text()),
    "text": offered(text()),
    "signature": without_effect(text(), "reasoning is read as it is sent"),
}

PICTURES = dict.fromkeys(
    ("image_url", "video_url", "audio_url", "input_audio", "file", "tool_reference", "refusal"), TEXT_ONLY
)

ASSISTANT_PARTS = {"text": TEXT_PART, "thinking": REASONING_PART, "reasoning": REASONING_PART}

PARTS = array_of(tagged({"text": TEXT_PART}, others=PICTURES))
"""Parts of the content of a message that is not the model's."""

FUNCTION_CALL: Table = {
    "name": offered(text(1), required=True),
    "arguments": offered(arguments(), required=True),
}

TOOL_CALL: Table = {
    "id": offered(text()),
    "index": without_effect(integer(0, MAX_TOKENS), "calls come in the order of the array"),
    "type": offered(one_of("function")),
    "function": offered(structure(FUNCTION_CALL), required=True),
    "provider_specific_fields": without_effect(json_object(), BESIDE_THE_TEXT),
}

DEFERRED = refused(NO_DEFERRED, harmless=one_of(False))

TOOL: Table = {
    "type": offered(one_of("function")),
    "function": offered(structure({**FUNCTION, "defer_loading": DEFERRED}), required=True),
    "defer_loading": DEFERRED,
    "cache_control": CACHE_CONTROL,
}

INSTRUCTION: Table = {
    "content": offered(either(text(), PARTS)),
    "name": without_effect(text(), NO_NAMES),
    "tools": offered(array_of(structure(TOOL))),
    "cache_control": CACHE_CONTROL,
}

USER: Table = {
    "content": offered(either(text(), PARTS), required=True),
    "name": without_effect(text(), NO_NAMES),
    "cache_control": CACHE_CONTROL,
}

ASSISTANT: Table = {
    "content": offered(
        either(
            text(),
            array_of(tagged(ASSISTANT_PARTS, others=PICTURES)),
        )
    ),
    "reasoning_content": offered(text()),
    "reasoning": translated(text(), "reasoning_content is SGLang's word"),
    "tool_calls": offered(array_of(structure(TOOL_CALL))),
    "prefix": translated(boolean(), "continue_final_message, of the last message"),
    "phase": without_effect(one_of("commentary", "final_answer"), "the model's format has no phases"),
    "name": without_effect(text(), NO_NAMES),
    "function_call": refused(NO_FUNCTIONS),
    "audio": refused(TEXT_ONLY),
    "refusal": refused("the model's format has no refusals; send it as content"),
    "annotations": without_effect(array_of(json_object()), BESIDE_THE_TEXT),
    "provider_specific_fields": without_effect(json_object(), BESIDE_THE_TEXT),
    "reasoning_details": without_effect(array_of(json_object()), BESIDE_THE_TEXT),
    "thinking_blocks": without_effect(array_of(json_object()), BESIDE_THE_TEXT),
    "cache_control": CACHE_CONTROL,
}

TOOL_RESULT: Table = {
    "content": offered(either(text(), PARTS)),
    "tool_call_id": offered(text(1), required=True),
    "name": without_effect(text(), "the call has its name"),
    "cache_control": CACHE_CONTROL,
}

MESSAGE = tagged(
    {
        "system": INSTRUCTION,
        "developer": INSTRUCTION,
        "user": USER,
        "assistant": ASSISTANT,
        "tool": TOOL_RESULT,
        "latest_reminder": {**USER, "content": offered(text(), required=True)},
    },
    "role",
    others={
        "function": "replaced by 'tool', with the tool_call_id of its call; send that",
        "root": "another model's; send 'system'",
    },
)

NAMED: Table = {"function": offered(structure({"name": offered(text(1), required=True)}), required=True)}

TOOL_CHOICE = either(
    one_of("auto", "none", "required"),
    tagged(
        {"function": NAMED},
        default="function",
        others={
            "allowed_tools": "not implemented: send the allowed tools alone as tools",
            "custom": "not implemented for chats: send a tool of type 'function'",
        },
    ),
)

EFFORTS = {"effort": translated(one_of(*TIERS), "the field reasoning_effort")}

REASONING: Table = {
    **EFFORTS,
    "enabled": translated(boolean(), "chat_template_kwargs.thinking is SGLang's word"),
    "exclude": refused("reasoning is part of the answer, as reasoning_content; leave it out", harmless=one_of(False)),
    "max_tokens": refused("reasoning is bounded by max_tokens alone; leave it out"),
    "summary": without_effect(one_of("auto", "concise", "detailed"), "a chat's answer has the reasoning itself"),
}

CHAT: Table = {
    **GENERATION,
    **OF_ONE_USER,
    **THINKING,
    "messages": offered(array_of(MESSAGE, least=1), required=True),
    "max_tokens": offered(BUDGET),
    "max_completion_tokens": offered(BUDGET),
    "logprobs": offered(boolean()),
    "top_logprobs": offered(integer(0, MAX_TOKENS)),
    "tools": offered(array_of(structure(TOOL))),
    "tool_choice": offered(TOOL_CHOICE),
    "parallel_tool_calls": offered(boolean()),
    "reasoning_effort": offered(one_of(*TIERS)),
    "reasoning": translated(structure(REASONING), "reasoning_effort and chat_template_kwargs.thinking"),
    "include_reasoning": refused(
        "reasoning is part of the answer, as reasoning_content; leave it out", harmless=one_of(True)
    ),
    "separate_reasoning": offered(boolean()),
    "stream_reasoning": offered(boolean()),
    "task": offered(one_of("action", "query", "authority", "domain", "title", "read_url")),
    "continue_final_message": offered(boolean()),
    "add_generation_prompt": refused("an answer always begins a turn; leave it out", harmless=one_of(True)),
    "echo": refused("the answer of a chat is the answer alone; send /v1/completions", harmless=one_of(False)),
    "best_of": refused("not implemented: send n, and choose", harmless=one_of(1)),
    "skip_special_tokens": without_effect(boolean(), "answers are read from token ids, with the model's own markup"),
    "verbosity": without_effect(VERBOSITIES, NO_VERBOSITY),
    "store": without_effect(boolean(), NOT_STORED),
    "prediction": without_effect(json_object(), "a hint for speed; the answer is the same"),
    "modalities": refused(TEXT_ONLY, harmless=one_of(["text"])),
    "audio": refused(TEXT_ONLY),
    "web_search_options": refused("the server searches nothing; send a tool of your own"),
    "functions": refused(NO_FUNCTIONS, harmless=EMPTY_ARRAY),
    "function_call": refused(NO_FUNCTIONS, harmless=one_of("auto", "none")),
    # SGLang's own
    "input_ids": offered(token_ids()),
    "rid": offered(request_name()),
    "extra_key": offered(text()),
    "cache_salt": offered(text()),
    "return_prompt_token_ids": offered(boolean()),
    "return_meta_info": offered(boolean()),
    "return_input_ids_in_sglext": offered(boolean()),
    "return_output_ids_in_sglext": offered(boolean()),
    "return_sampling_mask": OFF,
    "sampling_logprobs_mode": refused(NOT_IMPLEMENTED),
    "return_flat_raw_output_top_logprobs": offered(boolean()),
    "return_flat_raw_top_logprobs_b64": offered(boolean()),
    "max_dynamic_patch": refused(NO_PICTURES),
    "min_dynamic_patch": refused(NO_PICTURES),
    "use_audio_in_video": refused(NO_PICTURES, harmless=one_of(False)),
    "video_config": refused(NO_PICTURES),
}
