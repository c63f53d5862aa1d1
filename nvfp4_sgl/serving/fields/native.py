"""Fields of SGLang's own paths beside ``/generate``: tokens, scores, embeddings, and parsers of text."""

from __future__ import annotations

from nvfp4_sgl.limits import MAX_TEMPERATURE
from nvfp4_sgl.serving.fields.checks import (
    array_of,
    boolean,
    either,
    json_object,
    number,
    one_of,
    text,
    token_ids,
)
from nvfp4_sgl.serving.fields.field import Table, offered, refused
from nvfp4_sgl.serving.fields.generate import INTERNAL, TOKEN_IDS_ONLY

NO_EMBEDDINGS = "not offered: this model generates text and makes no embedding; use an embedding model"
SEVERAL_TOKEN_IDS = either(token_ids(least=0), array_of(token_ids(least=0)))

TOKENIZE: Table = {
    "model": offered(text(), null=False),
    "prompt": offered(either(text(), array_of(text()))),
    "messages": offered(array_of(json_object())),
    "tools": offered(array_of(json_object())),
    "tool_choice": offered(either(one_of("auto", "required", "none"), json_object())),
    "reasoning_effort": offered(either(text(), number(0, 0.99))),
    "continue_final_message": offered(boolean(), null=False),
    "chat_template_kwargs": offered(json_object()),
    "add_special_tokens": offered(boolean(), null=False),
    "add_generation_prompt": offered(boolean()),
}

DETOKENIZE: Table = {
    "model": offered(text(), null=False),
    "tokens": offered(SEVERAL_TOKEN_IDS, required=True),
    "skip_special_tokens": offered(boolean(), null=False),
}

SCORE: Table = {
    "model": offered(text(), null=False),
    "query": offered(either(text(), token_ids(least=0))),
    "items": offered(either(text(), array_of(text()), array_of(token_ids(least=0))), required=True),
    "label_token_ids": offered(either(token_ids(), array_of(token_ids(), least=1)), required=True),
    "apply_softmax": offered(boolean(), null=False),
    "temperature": offered(number(0, MAX_TEMPERATURE, above=True), null=False),
    "item_first": offered(boolean(), null=False),
    "return_token_logprobs": offered(boolean(), null=False),
    "score_extraction_token": offered(text(1)),
    "return_pooled_hidden_states": refused(NO_EMBEDDINGS, harmless=one_of(False), null=False),
    "embed_override_token_id": refused(TOKEN_IDS_ONLY),
    "query_embed_overrides": refused(TOKEN_IDS_ONLY),
    "item_embed_overrides": refused(TOKEN_IDS_ONLY),
}

EMBEDDINGS: Table = dict.fromkeys(
    (
        *("dimensions", "embed_override_token_id", "embed_overrides", "encoding_format", "input", "lora_path", "model"),
        *("priority", "rid", "user"),
    ),
    refused(NO_EMBEDDINGS, null=False),
)

MAX_PARSED_CHARACTERS = 2**16
"""Bound on a text that is parsed: that happens in the event loop, and takes up to 10 µs a character."""

# Other models' parsers have regular expressions whose time grows exponentially: one request would hold the server up.
PARSE_FUNCTION_CALL: Table = {
    "text": offered(text(longest=MAX_PARSED_CHARACTERS), required=True),
    "tools": offered(array_of(json_object()), required=True),
    "tool_call_parser": offered(one_of("deepseekv4"), required=True),
    "rid": refused(INTERNAL),
    "http_worker_ipc": refused(INTERNAL),
}

SEPARATE_REASONING: Table = {
    "text": offered(text(longest=MAX_PARSED_CHARACTERS), required=True),
    "reasoning_parser": offered(one_of("deepseek-v4"), required=True),
    "return_blocks": offered(boolean(), null=False),
    "rid": refused(INTERNAL),
    "http_worker_ipc": refused(INTERNAL),
}
