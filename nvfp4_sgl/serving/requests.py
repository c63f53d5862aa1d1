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
from nvfp4_sgl.serving.endpoints import is_deeper
from nvfp4_sgl.serving.fields.limits import (
    LARGEST,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_SEQUENCES,
    MAX_STOP_CHARACTERS,
    MAX_TOP_K,
)

EMBEDDINGS = ("input_embeds", "positional_embed_overrides")
"""Fields of a request that replace token ids, by which the first layers route."""

NOT_OFFERED = (
    "audio_data",
    "bootstrap_host",
    "bootstrap_pair_key",
    "bootstrap_port",
    "bootstrap_room",
    "custom_logit_processor",
    "decode_tp_size",
    "http_worker_ipc",
    "image_data",
    "lora_id",
    "multi_item_delimiter_indices",
    "return_indexer_topk",
    "return_routed_experts",
    "video_data",
)
"""Fields of a request that select what is not implemented, or that only SGLang's own processes set."""

MAX_GRAMMAR_CHARACTERS = 2**16
"""Bound on the text of a schema, regular expression or grammar: the slowest ones of that length compile in seconds."""

MAX_SCHEMA_DEPTH = 128
"""Bound on objects and arrays within each other in a schema, 64 properties in each other: compiling 300 takes 8 s.

xgrammar has a bound of its own for regular expressions and EBNF, and takes little time up to it.
"""

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""Fields of a request that hold one."""

RESERVED_TOKENS = 4
"""What SGLang's bound on prompts, which they must stay below, lacks to the longest sequence of prompt and answer."""

RESERVED_PAGES = 2
"""Pages of the pool that prompt and answer leave free: SGLang rounds a prompt up to pages and wants one more, and cuts
the answer short, to nothing in the end, where they are not there. That the window pool has room for them, too, is seen
to by :func:`nvfp4_sgl.serving.kv_pool.fit_chunk`."""


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


def normalize_request(original: Callable[..., None], request: Any) -> None:
    """Hook around SGLang's expansion of a request; :class:`ValueError` becomes status 400."""
    if not serves_our_model():
        original(request)
        return
    if message := request_fault(request):
        raise ValueError(message)
    try:
        original(request)
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"the request is malformed ({type(error).__name__}: {error})") from error
    if request.is_single and not isinstance(request.rid, str):
        raise ValueError(f"rid: found {request.rid!r}; expected a string")


def request_fault(request: Any) -> str | None:
    """Why SGLang's ``GenerateReqInput``, not yet expanded, cannot be followed, or ``None``."""
    for name in NOT_OFFERED:
        if getattr(request, name, None):
            return f"{name}: not offered for this model; leave it out"
    given = request.sampling_params
    for params in given if isinstance(given, list) else [given or {}]:
        if not isinstance(params, dict):
            return f"sampling_params: found {params!r:.80}; expected an object"
        n = params.get("n", 1)
        if not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
            return f"n: found {n!r:.80}; expected 1 to {MAX_CHOICES}"
        prompts = request.text if request.text is not None else request.input_ids
        batched = isinstance(prompts, list) and (not prompts or not isinstance(prompts[0], int))
        if batched and n * len(prompts) > MAX_SEQUENCES:
            return f"prompts times n: found {n * len(prompts)}; expected {MAX_SEQUENCES} or less; send several requests"
    return None


def worker_info(original: Callable[..., Any], worker: Any) -> Any:
    """Hook around the lengths that SGLang allows: what its pool has no room for is too long."""
    info = original(worker)
    return private.shorten_requests(info, pages=RESERVED_PAGES) if serves_our_model() else info


def advertise_length(manager: Any) -> None:
    """Let ``/v1/models`` say how long a sequence the pool can hold, where that is less than the model's context."""
    if manager.max_req_input_len is not None:
        config = manager.model_config
        config.context_len = min(config.context_len, manager.max_req_input_len + RESERVED_TOKENS)


def validate_in_front_end(original: Callable[..., None], manager: Any, request: Any, ids: Any) -> None:
    """Hook around the tokenizer manager's check of one request; :class:`ValueError` becomes status 400."""
    if serves_our_model():
        given = next((name for name in EMBEDDINGS if getattr(request, name, None) is not None), None)
        if given is not None:
            raise ValueError(f"{given}: this model takes token ids; its first layers route by them")
        top = getattr(request, "top_logprobs_num", 0)
        message = prompt_fault(ids, top, manager.model_config.vocab_size)
        if message := message or length_fault(len(ids), manager):
            raise ValueError(message)
    original(manager, request, ids)


def validate_in_scheduler(original: Callable[..., str | None], request: Any, *args: Any, **kwargs: Any) -> str | None:
    """Hook around the scheduler's check of a prompt's length: what is wrong with a request, or ``None``."""
    message = original(request, *args, **kwargs)
    if message is None and serves_our_model():
        message = prompt_fault(request.origin_input_ids, request.logprob.top_logprobs_num, request.vocab_size)
    return message


def length_fault(tokens: int, manager: Any) -> str | None:
    """Why a prompt of that many tokens does not fit, in the words of SGLang's scheduler, or ``None``.

    A longer one than the model's context is left to SGLang, which says so itself.
    """
    limit = manager.max_req_input_len
    if limit is None or manager.allow_auto_truncate or not limit <= tokens < manager.context_len:
        return None
    return f"Input length ({tokens} tokens) exceeds the maximum allowed length ({limit} tokens)."


def sampling_fault(params: Any, vocab_size: int) -> str | None:
    """Why SGLang's ``SamplingParams`` cannot be followed, or ``None``."""
    if not 1 <= params.n <= MAX_CHOICES:
        return f"n: found {params.n}; expected 1 to {MAX_CHOICES}"
    if params.sampling_seed is not None:
        return "seed: not honoured by this server, since deterministic inference is not implemented; leave it out"
    if params.beam_width not in (None, 1):
        return f"beam_width: found {params.beam_width}; beam search is not implemented for this model"
    if params.top_k > MAX_TOP_K:
        return f"top_k: found {params.top_k}; expected -1 or 1 to {MAX_TOP_K}"
    if params.repetition_penalty < 1 / LARGEST:
        return f"repetition_penalty: found {params.repetition_penalty}; expected {1 / LARGEST:.0e} or more"
    if len(params.logit_bias or ()) > MAX_LOGIT_BIASES:
        return f"logit_bias: found {len(params.logit_bias)} tokens; expected {MAX_LOGIT_BIASES} or fewer"
    for token, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= LARGEST:
            return f"logit_bias: found {bias} for token {token}; expected {-LARGEST} to {LARGEST}"
    for token in params.stop_token_ids or ():
        if not 0 <= token < vocab_size:
            return f"stop_token_ids: token id {token} is outside the vocabulary; expected 0 to {vocab_size - 1}"
    if params.stop_regex_strs or params.stop_regex:
        return "stop_regex: not offered, since one search may hold up every other request; use stop"
    stops = params.stop_strs or params.stop or ()
    if len("".join(stops)) > MAX_STOP_CHARACTERS:
        return f"stop: found {len(''.join(stops))} characters; expected {MAX_STOP_CHARACTERS} or fewer"
    return grammar_fault(params)


def grammar_fault(params: Any) -> str | None:
    """Why the grammar of a request is not compiled, or ``None``."""
    for name in GRAMMARS:
        text = getattr(params, name)
        if text is None:
            continue
        if not isinstance(text, str):
            return f"{name}: found {type(text).__name__}; expected a string"
        if fault := text_fault(name, text):
            return f"{name}: {fault}"
    return None


def text_fault(name: str, text: str) -> str | None:
    """Why the text of the grammar ``name`` is not compiled, or ``None``."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        return f"found {len(text)} characters; expected {MAX_GRAMMAR_CHARACTERS} or fewer"
    if name in ("json_schema", "structural_tag") and is_deeper(text, MAX_SCHEMA_DEPTH):
        return f"found objects and arrays more than {MAX_SCHEMA_DEPTH} deep; expected less"
    return None


def bound_tools(original: Callable[..., dict[str, Any]], request: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Hook around sampling parameters of a chat: what SGLang makes of its tools is refused under the tools' name.

    A grammar that the client sent is left to :func:`grammar_fault`. :class:`ValueError` becomes status 400.
    """
    params = original(request, *args, **kwargs)
    if not serves_our_model() or kwargs.get("tool_call_constraint") is None:
        return params
    sent = original(request, *args, **{**kwargs, "tool_call_constraint": None})
    for name in GRAMMARS:
        text = params.get(name)
        if isinstance(text, str) and sent.get(name) is None and (fault := text_fault(name, text)):
            raise ValueError(f"tools: the {name} that tool_choice makes of them: {fault}; send fewer or smaller tools")
    return params


def prompt_fault(ids: Sequence[int], top_logprobs: int, vocab_size: int) -> str | None:
    """Why a prompt of token ids, with that many top log-probabilities, cannot be served, or ``None``."""
    if not ids:
        return "the prompt has no tokens; expected at least one"
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        outside = next(token for token in ids if not 0 <= token < vocab_size)
        return f"input_ids: token id {outside} is outside the vocabulary; expected 0 to {vocab_size - 1}"
    if not isinstance(top_logprobs, int) or not 0 <= top_logprobs <= vocab_size:
        return f"top log-probabilities: asked for {top_logprobs}; expected 0 to {vocab_size}, the vocabulary's size"
    return None
