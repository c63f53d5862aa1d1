"""Refuses requests to our model that SGLang lets through although they cannot be answered.

Most of them would end the scheduler, and every other request with it: a token id outside the vocabulary indexes past
the embedding, a logit bias beyond fp32 makes every probability NaN. They are refused in the front end, where the
client still gets status 400; what a front end of another kind (gRPC, several tokenizer processes) lets through, the
scheduler refuses.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from nvfp4_sgl.serving import sglang_private as private
from nvfp4_sgl.serving.arguments import is_our_checkpoint

MAX_TOP_K = 2**30
"""SGLang's own value for the whole vocabulary; it keeps top-k in int32."""

LARGEST = 1e30
"""Largest logit bias, and inverse of the smallest repetition penalty.

Divided by the lowest temperature that is not greedy (1e-6), a logit that large still is an fp32 number.
"""

EMBEDDINGS = ("input_embeds", "positional_embed_overrides")
"""Fields of a request that replace token ids, by which the first layers route."""


def serves_our_model() -> bool:
    """Whether this process belongs to a server of our model; other models keep SGLang's rules."""
    return _is_ours(private.model_path())


_is_ours = functools.cache(is_our_checkpoint)


def normalize_sampling(original: Callable[..., None], params: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around SGLang's preparation of stop conditions: an invalid regular expression is the client's error."""
    try:
        original(params, *args, **kwargs)
    except re.error as error:
        raise ValueError(f"stop_regex: not a regular expression ({error})") from error


def verify_sampling(original: Callable[..., None], params: Any, vocab_size: int) -> None:
    """Hook around SGLang's check of sampling parameters; :class:`ValueError` becomes status 400."""
    original(params, vocab_size)
    if serves_our_model() and (message := sampling_fault(params, vocab_size)):
        raise ValueError(message)


def validate_in_front_end(original: Callable[..., None], manager: Any, request: Any, ids: Any) -> None:
    """Hook around the tokenizer manager's check of one request; :class:`ValueError` becomes status 400."""
    if serves_our_model():
        given = next((name for name in EMBEDDINGS if getattr(request, name, None) is not None), None)
        if given is not None:
            raise ValueError(f"{given}: this model takes token ids; its first layers route by them")
        top = getattr(request, "top_logprobs_num", 0)
        if message := prompt_fault(ids, top, manager.model_config.vocab_size):
            raise ValueError(message)
    original(manager, request, ids)


def validate_in_scheduler(original: Callable[..., str | None], request: Any, *args: Any, **kwargs: Any) -> str | None:
    """Hook around the scheduler's check of a prompt's length: what is wrong with a request, or ``None``."""
    message = original(request, *args, **kwargs)
    if message is None and serves_our_model():
        message = prompt_fault(request.origin_input_ids, request.logprob.top_logprobs_num, request.vocab_size)
    return message


def sampling_fault(params: Any, vocab_size: int) -> str | None:
    """Why SGLang's ``SamplingParams`` cannot be followed, or ``None``."""
    if params.n < 1:
        return f"n: found {params.n}; expected 1 or more"
    if params.top_k > MAX_TOP_K:
        return f"top_k: found {params.top_k}; expected -1 or 1 to {MAX_TOP_K}"
    if params.repetition_penalty < 1 / LARGEST:
        return f"repetition_penalty: found {params.repetition_penalty}; expected {1 / LARGEST:.0e} or more"
    for token, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= LARGEST:
            return f"logit_bias: found {bias} for token {token}; expected {-LARGEST} to {LARGEST}"
    for token in params.stop_token_ids or ():
        if not 0 <= token < vocab_size:
            return f"stop_token_ids: token id {token} is outside the vocabulary; expected 0 to {vocab_size - 1}"
    return None


def prompt_fault(ids: Sequence[int], top_logprobs: int, vocab_size: int) -> str | None:
    """Why a prompt of token ids, with that many top log-probabilities, cannot be served, or ``None``."""
    if not ids:
        return "the prompt has no tokens; expected at least one"
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        return f"input_ids: token id {outside} is outside the vocabulary; expected 0 to {vocab_size - 1}"
    if not 0 <= top_logprobs <= vocab_size:
        return f"top log-probabilities: asked for {top_logprobs}; expected 0 to {vocab_size}, the vocabulary's size"
    return None
