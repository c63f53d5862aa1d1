"""Fails a request whose logits are not finite, with status 500; the others of its batch go on.

A row of logits is looked at on the device, before its token is sampled. A row that holds NaN or +inf, or nothing but
-inf, becomes zeros, so that sampling stays valid, and its token id becomes :data:`FAILED`. The id travels to the host
as every other one does: nothing waits for the device. There SGLang ends a request at an id outside the vocabulary,
and these hooks make an error of that end, also of a request that is being aborted. The pass that has begun by then
takes 0 instead. (SGLang asserts on the device that there is no such id for its own tests alone, ``SGLANG_IS_IN_CI``.)

Keys and values of such a request may be NaN, too. It has shared those of its prompt with the prefix cache before its
logits were known, so that all cached prefixes that no running request uses are dropped with it. The same goes for a
prompt that is aborted between its chunks: the id that a chunk brings is used for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.ops.greedy import FAILED, greedy_tokens
from nvfp4_sgl.serving.sglang import request_state, scheduling
from nvfp4_sgl.triton_kernels.logits import greedy

_MARK = "nvfp4_sgl_failed"
"""Attribute of SGLang's request that has been failed."""
_SPOILT = "nvfp4_sgl_spoilt"
"""Attribute of SGLang's request of which a chunk of the prompt had logits that are not finite."""


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy tokens and the rows that have failed, as of :func:`nvfp4_sgl.ops.greedy.greedy_tokens`; no host sync."""
    if not logits.is_cuda:
        return greedy_tokens(logits)
    return greedy.greedy_tokens(logits, _semaphores(logits), mark=FAILED)


_held: dict[torch.device, Tensor] = {}
"""Semaphores of :func:`choose`, which is called on one stream of a device."""


def _semaphores(logits: Tensor) -> Tensor:
    """One a row, zero; more are allocated as batches grow, for twice as many rows."""
    found = _held.get(logits.device)
    if found is None or len(found) < len(logits):
        found = _held[logits.device] = logits.new_zeros(max(1024, 2 * len(logits)), dtype=torch.int32)
    return found


def sample(
    original: Callable[..., Tensor], sampler: Any, output: Any, info: Any, logprobs: bool, *args: Any, **kwargs: Any
) -> Tensor:
    """Hook around SGLang's sampler: int [B], :data:`FAILED` for rows of logits that are not finite.

    A batch that is all greedy has its tokens from the check, so that its logits are read once.
    """
    tokens = greedy_alone(sampler, output.next_token_logits, info, logprobs, **kwargs)
    if tokens is not None:
        return tokens
    _, failed = choose(output.next_token_logits)
    return original(sampler, output, info, logprobs, *args, **kwargs).masked_fill_(failed, FAILED)


def greedy_alone(sampler: Any, logits: Tensor, info: Any, logprobs: bool, **kwargs: Any) -> Tensor | None:
    """int64 [B] of :func:`choose`, the same on all ranks; ``None`` if SGLang's ``sampler`` has more to do.

    Args:
        logits: fp32 [B, vocabulary]. info, logprobs, kwargs: as of :func:`.scheduling.is_argmax_alone`.
    """
    if not scheduling.is_argmax_alone(info, logprobs, **kwargs):
        return None
    tokens, _ = choose(logits)
    scheduling.agree_on_tokens(sampler, tokens, info)
    return tokens


def check_token_ids(original: Callable[..., bool], request: Any, tokens: Any) -> bool:
    """Hook around SGLang's check of the token ids that a pass gives ``request``: an invalid id is an error."""
    found = original(request, tokens)
    if found:
        position, said = request_state.sequence_length(request) - 1, len(request.output_ids)
        words = (
            f"the logits for position {position} (token {said} of the answer) are NaN or infinite;"
            " only this request has failed; send it again, and see docs/troubleshooting.md if it fails every time"
        )
        if said <= (least := request_state.min_new_tokens_of_restricted(request)):
            words = (
                f"min_new_tokens: found {least}, and a grammar or stop_token_ids that allow nothing but the end for"
                f" position {position} (token {said} of the answer), or NaN or infinite logits. Only this request has"
                " failed; send fewer, a grammar of longer answers, or fewer stop_token_ids"
            )
        request_state.fail(request, words)
        setattr(request, _MARK, True)
    return found


def update_finish_state(original: Callable[..., None], request: Any, new_accepted_len: int = 1) -> None:
    """Hook around SGLang's check for the end of ``request``: an invalid id takes precedence over an abort.

    An aborted request is answered and its pages are cached as others are: the id would end the detokenizer.
    """
    if not request_state.end_outside_vocabulary(request, new_accepted_len):
        original(request, new_accepted_len)


def prefill_result(original: Callable[..., None], processor: Any, batch: Any, result: Any) -> None:
    """Hook around SGLang's processing of a prefill pass: remember the requests whose chunk was not finite.

    A chunk is cached when the next one is launched, and an abort comes to a prompt after the results of all chunks but
    the last one that was launched: what is remembered here is known when the request is released.
    """
    original(processor, batch, result)
    for request, token in zip(batch.reqs, result.next_token_ids.tolist(), strict=False):
        if token == FAILED:
            setattr(request, _SPOILT, True)


def has_failed(request: Any) -> bool:
    """Whether :func:`check_token_ids` has failed SGLang's ``request``."""
    return getattr(request, _MARK, False)


def release_request(original: Callable[..., None], request: Any, tree_cache: Any, **kwargs: Any) -> None:
    """Hook around SGLang's release of a request's pages: after one that is not finite, no cached prefix is trusted."""
    original(request, tree_cache, **kwargs)
    if has_failed(request) or getattr(request, _SPOILT, False):
        scheduling.forget_prefixes(tree_cache)


HOOKS: dict[str, Callable[..., Any]] = {
    "sample": sample,
    "check_token_ids": check_token_ids,
    "update_finish_state": update_finish_state,
    "prefill_result": prefill_result,
    "release_request": release_request,
}
"""What is installed into the scheduler of our model, by name in :data:`nvfp4_sgl.serving.sglang.hooked.HOOKS`."""
