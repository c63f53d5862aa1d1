"""Refuses requests to our model that SGLang lets through although they cannot be answered.

Most of them would end the scheduler, and every other request with it: a token id outside the vocabulary indexes past
the embedding, a logit bias beyond fp32 makes every probability NaN. They are refused in the front end, where the
client still gets status 400; what a front end of another kind (gRPC, several tokenizer processes) lets through, the
scheduler refuses.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from nvfp4_sgl.limits import MAX_TEMPERATURE, MIN_REPETITION_PENALTY
from nvfp4_sgl.serving.answer_text import longest
from nvfp4_sgl.serving.arguments import is_our_checkpoint
from nvfp4_sgl.serving.endpoints import is_deeper
from nvfp4_sgl.serving.fields.checks import depth_of, is_int
from nvfp4_sgl.serving.fields.field import Verdict
from nvfp4_sgl.serving.fields.generate import GENERATE, PER_PROMPT
from nvfp4_sgl.serving.fields.limits import (
    LARGEST,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_SEQUENCES,
    MAX_STOP_CHARACTERS,
    MAX_TOP_K,
)
from nvfp4_sgl.serving.sglang import front_end, scheduling, settings

EMBEDDINGS = ("input_embeds", "positional_embed_overrides")
"""Fields of a request that replace token ids, by which the first layers route."""

SET_BY_SGLANG = frozenset(
    {"background", "custom_labels", "external_trace_header", "log_metrics", "lora_path", "received_time"}
    | {"token_indices_to_pool"}
)
"""Fields that clients may not send and that SGLang's own routes set; an adapter is refused by SGLang."""

NOT_OFFERED = tuple(
    name for name, field in GENERATE.items() if field.verdict is Verdict.REFUSED and name not in SET_BY_SGLANG
)
"""Fields that no route may have set: they select what is not implemented."""

MAX_GRAMMAR_CHARACTERS = 2**16
"""Bound on the text of a schema, regular expression or grammar; :mod:`nvfp4_sgl.serving.grammar_process` bounds what it
takes to compile them."""

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
    return _is_ours(settings.model_path())


_is_ours = functools.cache(is_our_checkpoint)


def normalize_sampling(original: Callable[..., None], params: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around SGLang's preparation of stop conditions: an invalid regular expression is the client's error.

    SGLang looks for stop strings in as many tokens as the tokenizer needs for them; a model may need more.
    """
    try:
        original(params, *args, **kwargs)
    except re.error as error:
        raise ValueError(f"stop_regex: not a regular expression ({error})") from error
    if serves_our_model():
        params.stop_str_max_len = longest(params.stop_strs)


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
    try:
        if message := request_fault(request):
            raise ValueError(message)
        try:
            original(request)
        except (AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"the request is malformed ({type(error).__name__}: {error})") from error
        if request.is_single and not isinstance(request.rid, str):
            raise ValueError(f"rid: found {request.rid!r}; expected a string")
    except ValueError:
        # After the end of a stream SGLang aborts what is left of its requests, and asks for both.
        request.is_single, request.rid = True, None
        raise


def request_fault(request: Any) -> str | None:
    """Why SGLang's ``GenerateReqInput``, not yet expanded, cannot be followed, or ``None``."""
    for name in NOT_OFFERED:
        if (value := getattr(request, name, None)) and (fault := GENERATE[name].fault(name, value)) is not None:
            return fault
    if request.text is not None and request.input_ids is not None:
        return "text, input_ids: found both; expected one of them"
    given = request.sampling_params
    for params in given if isinstance(given, list) else [given or {}]:
        if not isinstance(params, dict):
            return f"sampling_params: found {params!r:.80}; expected an object"
        n = params.get("n", 1)
        if not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
            return f"n: found {n!r:.80}; expected 1 to {MAX_CHOICES}"
        count = prompt_count(request)
        if count is not None and n * count > MAX_SEQUENCES:
            return f"prompts times n: found {n * count}; expected {MAX_SEQUENCES} or less; send several requests"
    return count_fault(request)


def prompt_count(request: Any) -> int | None:
    """The number of prompts of a request that is not yet expanded; ``None`` if it is a single one, in no array."""
    prompts = request.text if request.text is not None else request.input_ids
    return len(prompts) if isinstance(prompts, list) and (not prompts or not isinstance(prompts[0], int)) else None


def count_fault(request: Any) -> str | None:
    """Why arrays of one value for each prompt do not fit the prompts, or ``None``."""
    count = prompt_count(request)
    for name, depth in PER_PROMPT.items():
        value: Any = getattr(request, name, None)
        if depth_of(value) <= depth:
            continue
        if count is None:
            return f"{name}: found {value!r:.80}; expected no array of them, as there is one prompt"
        if len(value) != count:
            return f"{name}: found {len(value)} entries; expected one for each of {count} prompts"
    return None


def worker_info(original: Callable[..., Any], worker: Any) -> Any:
    """Hook around the lengths that SGLang allows: what its pool has no room for is too long."""
    info = original(worker)
    return scheduling.shorten_requests(info, pages=RESERVED_PAGES) if serves_our_model() else info


def advertise_length(manager: Any) -> None:
    """Let ``/v1/models`` say how long a sequence the pool can hold, where that is less than the model's context.

    ``/tokenize`` says what the tokenizer has, which nothing else reads: SGLang never has it cut a text short.
    """
    config = manager.model_config
    if manager.max_req_input_len is not None:
        config.context_len = min(config.context_len, manager.max_req_input_len + RESERVED_TOKENS)
    if manager.tokenizer is not None:
        manager.tokenizer.model_max_length = config.context_len


def tokens_fault(tokens: Sequence[Any], vocab_size: int) -> str | None:
    """Why token ids, or lists of them, are no text, or ``None``."""
    for ids in tokens if depth_of(tokens) > 1 else [tokens]:
        for token in ids:
            if not (is_int(token) and 0 <= token < vocab_size):
                return f"tokens: token id {token} is outside the vocabulary; expected 0 to {vocab_size - 1}"
    return None


def validate_in_front_end(original: Callable[..., None], manager: Any, request: Any, ids: Any) -> None:
    """Hook around the tokenizer manager's check of one request; :class:`ValueError` becomes status 400."""
    if serves_our_model():
        given = next((name for name in EMBEDDINGS if getattr(request, name, None) is not None), None)
        if given is not None:
            raise ValueError(f"{given}: this model takes token ids; its first layers route by them")
        top = getattr(request, "top_logprobs_num", 0)
        message = prompt_fault(ids, top, manager.model_config.vocab_size)
        message = message or logprob_fault(request, len(ids), manager.model_config.vocab_size)
        if message := message or length_fault(len(ids), manager):
            raise ValueError(message)
    original(manager, request, ids)


def validate_in_scheduler(original: Callable[..., str | None], request: Any, *args: Any, **kwargs: Any) -> str | None:
    """Hook around the scheduler's check of a prompt's length: what is wrong with a request, or ``None``."""
    message = original(request, *args, **kwargs)
    if message is None and serves_our_model():
        message = prompt_fault(request.origin_input_ids, request.logprob.top_logprobs_num, request.vocab_size)
    return message


def validate_when_admitted(original: Callable[..., bool], manager: Any, request: Any) -> bool:
    """Hook around the scheduler's look at a request's grammar, the last before it waits for its turn."""
    if serves_our_model() and request.to_finish is None:
        parts = {name: getattr(request, name) for name in ("logprob_start_len", "token_indices_to_pool")}
        asked = SimpleNamespace(**parts, token_ids_logprob=request.logprob.token_ids_logprob)
        if message := logprob_fault(asked, len(request.origin_input_ids), request.vocab_size):
            request.set_finish_with_abort(message)
            return False
    return original(manager, request)


def validate_for_transport(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hook around the message to the scheduler, which ends at one that it cannot read."""
    message = original(*args, **kwargs)
    if serves_our_model() and (fault := front_end.transport_fault(message)) is not None:
        raise ValueError(f"the request is malformed ({fault})")
    return message


def logprob_fault(request: Any, tokens: int, vocab_size: int) -> str | None:
    """Why the log-probabilities that one request asks for cannot be given, or ``None``.

    Args:
        tokens: of its prompt.
    """
    start = getattr(request, "logprob_start_len", None)
    if start is not None and not (is_int(start) and -1 <= start <= tokens):
        return f"logprob_start_len: found {start!r:.80}; expected -1 to {tokens}, the tokens of the prompt"
    for name, bound in (("token_ids_logprob", vocab_size), ("token_indices_to_pool", tokens)):
        given = getattr(request, name, None)
        if not given:
            continue
        values = given if isinstance(given, list) else [given]
        if not all(is_int(value) and 0 <= value < bound for value in values):
            return f"{name}: found {given!r:.80}; expected integers from 0 to {bound - 1}"
    return None


def length_fault(tokens: int, manager: Any) -> str | None:
    """Why a prompt of that many tokens does not fit, or ``None``.

    A longer one than the model's context is left to SGLang, which says so itself.
    """
    limit = manager.max_req_input_len
    if limit is None or manager.allow_auto_truncate or not limit <= tokens < manager.context_len:
        return None
    return (
        f"Input length ({tokens} tokens) exceeds the maximum allowed length ({limit - 1} tokens); shorten the prompt."
    )


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
    if params.temperature > MAX_TEMPERATURE:
        return f"temperature: found {params.temperature:g}; expected {MAX_TEMPERATURE:g} or less"
    if params.repetition_penalty < MIN_REPETITION_PENALTY:
        return f"repetition_penalty: found {params.repetition_penalty}; expected {MIN_REPETITION_PENALTY:g} or more"
    if len(params.logit_bias or ()) > MAX_LOGIT_BIASES:
        return f"logit_bias: found {len(params.logit_bias)} tokens; expected {MAX_LOGIT_BIASES} or fewer"
    for token, bias in (params.logit_bias or {}).items():
        if not 0 <= int(token) < vocab_size:
            return f"logit_bias: token id {token} is outside the vocabulary; expected 0 to {vocab_size - 1}"
        if not abs(bias) <= LARGEST:
            return f"logit_bias: found {bias} for token {token}; expected {-LARGEST} to {LARGEST}"
    for token in params.stop_token_ids or ():
        if not 0 <= token < vocab_size:
            return f"stop_token_ids: token id {token} is outside the vocabulary; expected 0 to {vocab_size - 1}"
    if params.stop_regex_strs or params.stop_regex:
        return "stop_regex: not offered, since one search may hold up every other request; use stop"
    given = params.stop_strs or params.stop or ()
    stops = [given] if isinstance(given, str) else given
    if "" in stops or params.stop == "" or params.stop_strs == "":
        return "stop: found an empty string, which would end every answer at once; leave it out"
    if stops and params.min_new_tokens:
        return "min_new_tokens: does not delay stop strings, found both; use stop_token_ids, or leave one out"
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
        if not isinstance(text, str) or sent.get(name) is not None:
            continue
        if fault := text_fault(name, text):
            raise ValueError(f"tools: the {name} that tool_choice makes of them: {fault}; send fewer or smaller tools")
        if name == "structural_tag" and (most := most_whitespace()) is not None:
            params[name] = json.dumps(bound_whitespace(json.loads(text), most))
    return params


def most_whitespace() -> int | None:
    """Most characters of whitespace in a row that flags allow in JSON; 1 where none is needed, xgrammar's least."""
    if settings.resolved("constrained_json_disable_any_whitespace"):
        return 1
    most: int | None = settings.resolved("constrained_json_max_whitespace_cnt")
    return most


def bound_whitespace(tag: Any, most: int) -> Any:
    """A structural tag whose schemas allow ``most`` characters of whitespace in a row, unless they say themselves.

    SGLang's flags hold for JSON schemas alone; the tag that it makes of tools would take whitespace without end.
    """
    if isinstance(tag, list):
        return [bound_whitespace(part, most) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and "json_schema" in tag:
        return {**tag, "max_whitespace_cnt": tag.get("max_whitespace_cnt") or most}
    return {key: bound_whitespace(part, most) for key, part in tag.items()}


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
