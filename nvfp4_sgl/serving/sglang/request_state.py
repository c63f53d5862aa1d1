"""A request in the scheduler, and a batch of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from nvfp4_sgl.serving.sglang.ledger import find


def abort(request: Any, message: str) -> None:
    """Have the scheduler finish ``request`` with status 400 and ``message``."""
    finish = find("FINISH_ABORT")
    request.to_finish = finish(message, HTTPStatus.BAD_REQUEST, "BadRequestError")


def fail(request: Any, message: str) -> None:
    """Finish ``request``, whose last token id is invalid, with status 500 and ``message``; none of its pages is
    kept."""
    finish = find("FINISH_ABORT")
    request.finished_reason = finish(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
    request.skip_radix_cache_insert = True
    # The detokenizer ends at an invalid id: neither the answer nor its log-probabilities may hold one.
    request.output_ids[-1] = max(0, request.output_ids[-1])
    request.return_logprob = False


def min_new_tokens_of_restricted(request: Any) -> int:
    """``min_new_tokens`` of a request with a grammar or ``stop_token_ids``, which may leave only the end; else 0."""
    params = request.sampling_params
    return int(params.min_new_tokens) if request.grammar is not None or params.stop_token_ids else 0


@contextlib.contextmanager
def answer_ends_at(request: Any, tokens: int) -> Iterator[None]:
    """Inside the context SGLang sends no more than the first ``tokens`` of the answer of ``request``, which goes on."""
    request.finished_len = tokens
    try:
        yield
    finally:
        request.finished_len = None


def match_stop(request: Any, stop: str | None) -> None:
    """Let ``stop``, unless it is ``None``, be the stop string that has ended ``request``, instead of another one."""
    finish = find("FINISH_MATCHED_STR")
    if stop is not None and isinstance(request.finished_reason, finish):
        request.finished_reason = finish(matched=stop)


def end_outside_vocabulary(request: Any, new_tokens: int) -> bool:
    """End ``request``, which is to be aborted, if an id outside the vocabulary is among its last ``new_tokens``.

    SGLang's own check of ids ends it, with the hooks on that, and the abort is void. Returns whether it has ended so.
    """
    if new_tokens < 1 or request.to_finish is None or request.finished():
        return False
    found = bool(request._check_vocab_boundary_finish(request.output_ids[-new_tokens:]))
    if found:
        request.to_finish = None
    return found


def sequence_length(request: Any) -> int:
    """Tokens of a scheduled request, prompt and answer."""
    return len(request.origin_input_ids) + len(request.output_ids)


def decoding_lengths(batch: Any, result: Any) -> list[int]:
    """Tokens up to each query of a decode pass over ``batch`` whose ``result`` is not yet processed.

    A request has one query, and with drafts as many as a round has rows.

    Under the overlap schedule a request that has ended runs one pass more.
    """
    rows = result.speculative_num_draft_tokens or 1
    running = [one for one in batch.reqs if not (one.finished() or one.is_retracted)]
    return [sequence_length(one) + row for one in running for row in range(rows)]
