"""Fields of ``/v1/completions``: SGLang's ``CompletionRequest``."""

from __future__ import annotations

from typing import Any

from nvfp4_sgl.serving.fields.checks import (
    MAX_TOKENS,
    Check,
    array_of,
    boolean,
    either,
    integer,
    one_of,
    per_prompt,
    text,
    token_ids,
)
from nvfp4_sgl.serving.fields.field import Table, offered, refused
from nvfp4_sgl.serving.fields.generate import SAMPLING_PARAMS
from nvfp4_sgl.serving.fields.limits import MAX_CHOICES, MAX_SEQUENCES
from nvfp4_sgl.serving.fields.openai import BUDGET, GENERATION
from nvfp4_sgl.serving.fields.values import request_name

NO_CHATS = "a field of chats; send /v1/chat/completions"

TEXTS = array_of(text(), least=1, most=MAX_SEQUENCES)
IDS = array_of(token_ids(), least=1, most=MAX_SEQUENCES)


def prompt() -> Check:
    """A text, token ids, or an array of either; what a wrong one should be follows from what it begins with."""
    kinds = (text(1), TEXTS, token_ids(), IDS)
    every = either(*kinds)

    def fault(where: str, value: Any) -> str | None:
        first = value[0] if isinstance(value, list) and value else None
        for kind, check in ((str, TEXTS), (int, token_ids()), (list, IDS)):
            if type(first) is kind:
                return check.fault(where, value)
        return every.fault(where, value)

    return Check(every.expected, fault, every.inside, every.outside)


COMPLETION: Table = {
    **GENERATION,
    "prompt": offered(prompt(), required=True),
    "max_tokens": offered(BUDGET),
    "echo": offered(boolean()),
    "logprobs": offered(integer(0, MAX_TOKENS)),
    "best_of": offered(integer(1, MAX_CHOICES)),
    "suffix": refused("not implemented; leave it out", harmless=one_of("")),
    "json_schema": offered(text()),
    "skip_special_tokens": SAMPLING_PARAMS["skip_special_tokens"],
    "rid": offered(per_prompt(request_name())),
    "extra_key": offered(per_prompt(text())),
    "cache_salt": offered(per_prompt(text())),
    "custom_labels": refused("read from a header, which --tokenizer-metrics-custom-labels-header names; send it there"),
    "messages": refused(NO_CHATS),
}
