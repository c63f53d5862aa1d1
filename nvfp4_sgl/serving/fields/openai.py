"""Fields that the bodies of OpenAI's paths have in common."""

from __future__ import annotations

from typing import Any

from nvfp4_sgl.serving.endpoints import MAX_BODY_DEPTH, is_deeper
from nvfp4_sgl.serving.fields.checks import (
    INT64,
    MAX_TOKENS,
    Check,
    array_of,
    boolean,
    either,
    found,
    integer,
    json_object,
    one_of,
    plain,
    text,
)
from nvfp4_sgl.serving.fields.field import Table, offered, refused, translated, without_effect
from nvfp4_sgl.serving.fields.generate import (
    GENERATE,
    NO_LORA,
    NO_PICTURES,
    NO_SEEDS,
    NOT_IMPLEMENTED,
    SAMPLING_PARAMS,
    STOP,
)
from nvfp4_sgl.serving.fields.limits import DRAFTING, MAX_CHOICES, SEEDS
from nvfp4_sgl.serving.fields.objects import structure, tagged

NO_TIERS = "every request is served alike"
NOT_STORED = "nothing is stored: there is no way to ask for it later"
CACHE_IS_AUTOMATIC = "every prefix is cached, whoever sends it"
NOT_IDENTIFIED = "names the client's user; the server neither keeps nor reads it"
TEXT_ONLY = "not offered: this model reads and writes text only"

TIERS = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
"""Reasoning efforts. SGLang's number from 0 to 0.99 is DeepSeek-V4.1's, and so refused."""

VERBOSITIES = one_of("low", "medium", "high")
NO_VERBOSITY = "the model's format has no word for it; say it in a message"
NO_OBFUSCATION = "padding against readers of encrypted traffic; none is sent"

SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority")

BUDGET = plain(
    f"an integer from 1 to {MAX_TOKENS}",
    lambda value: type(value) is int and 1 <= value <= MAX_TOKENS,
    inside=(1, 3),
    outside=(0, -1, MAX_TOKENS + 1, True, 1.5, "1", [], {}),
)
"""Tokens of an answer: with its prompt, the highest number is more than a context holds."""

OFF = refused(NOT_IMPLEMENTED, harmless=one_of(False))
"""A switch of what is not implemented."""

EMPTY_ARRAY = plain("an empty array", lambda value: value == [], inside=([],), outside=([5], {}, "", 5))

CACHE_CONTROL = without_effect(json_object(), CACHE_IS_AUTOMATIC)

OF_ONE_USER: Table = {
    "metadata": without_effect(json_object(), "labels for the client's own use"),
    "user": without_effect(text(), NOT_IDENTIFIED),
    "safety_identifier": without_effect(text(), NOT_IDENTIFIED),
    "prompt_cache_key": without_effect(text(), CACHE_IS_AUTOMATIC),
    "prompt_cache_retention": without_effect(text(), "cached prefixes stay until their room is needed"),
    "service_tier": without_effect(one_of(*SERVICE_TIERS), NO_TIERS),
}
"""What clients say of themselves, to each of OpenAI's paths but completions."""

REQUEST: Table = {
    **{
        name: GENERATE[name]
        for name in (
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "data_parallel_rank",
            "disagg_prefill_dp_rank",
            "priority",
            "routed_dp_rank",
            "session_id",
        )
    },
}
"""SGLang's own fields of a request, of all paths."""

ORDINARY_SAMPLING: Table = {
    name: SAMPLING_PARAMS[name]
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    )
} | {"stop": offered(STOP)}
"""Sampling that every path offers."""

STREAM_OPTIONS: Table = {
    "include_usage": offered(boolean()),
    "continuous_usage_stats": offered(boolean()),
    "include_obfuscation": without_effect(boolean(), NO_OBFUSCATION),
}

SCHEMA_FORMAT: Table = {
    "name": offered(text(1), required=True),
    "description": offered(text()),
    "schema": offered(json_object(), required=True),
    "strict": offered(boolean()),
}

LOOSE_SCHEMA: Table = {
    "json_schema": offered(structure(SCHEMA_FORMAT)),
    "schema": translated(json_object(), "json_schema, with the name Schema, is what SGLang reads"),
}

STRUCTURE: Table = {
    "begin": offered(text(1), required=True),
    "schema": offered(json_object()),
    "end": offered(text(1), required=True),
}

LEGACY_TAG: Table = {
    "structures": offered(array_of(structure(STRUCTURE))),
    "triggers": offered(array_of(text(1))),
    "at_least_one": offered(boolean(), null=False),
    "format": offered(json_object()),
}

RESPONSE_FORMAT = tagged({"text": {}, "json_object": {}, "json_schema": LOOSE_SCHEMA, "structural_tag": LEGACY_TAG})

GUIDED = "another server's word; send response_format, regex or ebnf"

OF_OTHER_SERVERS: Table = {
    "add_special_tokens": refused("the format of prompts is fixed; leave it out", harmless=one_of(False)),
    "guided_json": refused(GUIDED),
    "guided_regex": refused(GUIDED),
    "guided_choice": refused(GUIDED),
    "guided_grammar": refused(GUIDED),
    "structured_outputs": refused(GUIDED),
    "include_stop_str_in_output": refused("another server's word; send no_stop_trim", harmless=one_of(False)),
    "length_penalty": refused("beam search is not implemented; leave it out", harmless=one_of(1, 1.0)),
    "prompt_logprobs": refused("not offered here; send /generate with return_logprob and logprob_start_len 0"),
    "use_beam_search": refused("beam search is not implemented; leave it out", harmless=one_of(False)),
}
"""What clients of other servers send: no field of SGLang's, which ignores it."""

GENERATION: Table = {
    **REQUEST,
    **ORDINARY_SAMPLING,
    **OF_OTHER_SERVERS,
    "model": offered(text()),
    "logit_bias": SAMPLING_PARAMS["logit_bias"],
    "min_tokens": offered(integer(0, MAX_TOKENS)),
    "n": offered(integer(1, MAX_CHOICES)),
    "seed": offered(integer(-INT64 - 1, INT64), mode=SEEDS, why=NO_SEEDS),
    "stop_token_ids": SAMPLING_PARAMS["stop_token_ids"],
    "stop_regex": SAMPLING_PARAMS["stop_regex"],
    "no_stop_trim": SAMPLING_PARAMS["no_stop_trim"],
    "ignore_eos": SAMPLING_PARAMS["ignore_eos"],
    "regex": SAMPLING_PARAMS["regex"],
    "ebnf": SAMPLING_PARAMS["ebnf"],
    "response_format": offered(RESPONSE_FORMAT),
    "custom_params": SAMPLING_PARAMS["custom_params"],
    "watermark": refused(NOT_IMPLEMENTED),
    "custom_logit_processor": GENERATE["custom_logit_processor"],
    "stream": offered(boolean()),
    "stream_options": offered(structure(STREAM_OPTIONS)),
    "user": OF_ONE_USER["user"],
    "return_hidden_states": OFF,
    "return_routed_experts": OFF,
    "routed_experts_start_len": refused(NOT_IMPLEMENTED, harmless=one_of(0)),
    "return_cached_tokens_details": offered(boolean()),
    "return_spec_tokens_details": offered(
        boolean(),
        mode=DRAFTING,
        why="this server runs no draft (--speculative-algorithm); leave it out",
        harmless=one_of(False),
    ),
    "return_token_ids": offered(boolean()),
    "lora_path": refused(NO_LORA),
    "session_params": GENERATE["session_params"],
    "images_config": refused(NO_PICTURES),
    "mm_processor_kwargs": refused(NO_PICTURES),
}
"""Fields of chats and of completions."""

REASONING_SWITCHES: Table = {
    "thinking": offered(boolean()),
    "enable_thinking": translated(boolean(), "thinking is this model's word"),
    "reasoning_effort": translated(one_of(*TIERS), "the field reasoning_effort, or reasoning.effort of a response"),
    "spaces_between_special_tokens": without_effect(boolean(), "answers are read from token ids"),
    "add_generation_prompt": refused("an answer always begins a turn; leave it out", harmless=one_of(True)),
    "chat_template": refused("a client's template is not rendered: the format is this model's; leave it out"),
}
"""Fields of ``chat_template_kwargs``. This model has no template in Jinja; nothing else is read."""

THINKING_CONFIG: Table = {
    "budget_tokens": without_effect(integer(0, MAX_TOKENS), "reasoning is bounded by max_tokens alone"),
}

THINKING: Table = {
    "chat_template_kwargs": offered(structure(REASONING_SWITCHES)),
    "enable_thinking": translated(boolean(), "chat_template_kwargs.thinking is SGLang's word"),
    "thinking": translated(
        either(boolean(), tagged(dict.fromkeys(("enabled", "disabled", "adaptive", "auto"), THINKING_CONFIG))),
        "chat_template_kwargs.thinking is SGLang's word",
    ),
}
"""Switches of reasoning, by the words of several servers; :mod:`nvfp4_sgl.serving.fields.thinking` joins them."""

FUNCTION: Table = {
    "name": offered(text(1), required=True),
    "description": offered(text()),
    "parameters": offered(json_object()),
    "strict": offered(boolean()),
}


def arguments() -> Check:
    """Arguments of a call in the history. SGLang parses a string of them, and answers 500 if that nests deeply."""
    expected = "a string or an object"

    def fault(where: str, value: Any) -> str | None:
        if not isinstance(value, str | dict):
            return found(where, value, expected)
        deep = isinstance(value, str) and is_deeper(value, MAX_BODY_DEPTH)
        return f"{where}: found objects and arrays more than {MAX_BODY_DEPTH} deep; expected less" if deep else None

    nested = "[" * (MAX_BODY_DEPTH + 1) + "]" * (MAX_BODY_DEPTH + 1)
    return Check(expected, fault, ('{"a": 1}', "{", {"a": 1}), (nested, 5, True, []))


NO_DEFERRED = "deferred tools are not implemented for this model; leave it out"
