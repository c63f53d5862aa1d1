"""Accepts guesses of a round: those that the target would have answered itself.

In every row of a verify pass a token is sampled as in a pass without drafts: with the request's temperature, top-k,
top-p, min-p, bias, grammar and seed, and with the penalties of all tokens in front of the row. A guess is accepted if
the row in front of it has sampled the same token; the first row that disagrees gives the round's last token. Guesses
are the draft's likeliest tokens, so that this is rejection sampling (Leviathan et al. 2023, arXiv:2211.17192, section
2.3): a guess x is accepted with the probability p(x), and what is sampled otherwise is distributed as p without x.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.ops import drafts
from nvfp4_sgl.ops.drafts import Accepted
from nvfp4_sgl.serving import finite_logits
from nvfp4_sgl.serving.drafts.penalties import Penalties
from nvfp4_sgl.serving.drafts.simulated import simulated_length
from nvfp4_sgl.serving.sglang import parallel, scheduling
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.triton_kernels.logits import accept as kernel


def accept_round(guesses: Tensor, answers: Tensor, starts: Tensor) -> Accepted:
    """As :func:`nvfp4_sgl.ops.drafts.accept_guesses`, one launch on a GPU; of :func:`force_rows` where simulated."""
    expected = simulated_length()
    if expected is not None:
        guesses = force_rows(guesses, answers, expected)
    if guesses.is_cuda:
        return Accepted(*kernel.accept_guesses(guesses, answers, starts))
    return drafts.accept_guesses(guesses, answers, starts)


_draws = random.Random(0)
"""The same on every rank."""


_WRONG = torch.iinfo(torch.int64).min
"""A guess that no answer equals."""


def force_rows(guesses: Tensor, answers: Tensor, expected: float) -> Tensor:
    """Guesses by which every request has so many rows accepted: ``expected``, rounded up or down by one draw.

    Makes the accepted guesses the rows' tokens in ``answers``. Three launches at most, so that a round takes about as
    long as one that is not simulated.
    """
    length = math.floor(expected)
    length += _draws.random() < expected - length
    if length > 1:
        answers[:, : length - 1] = guesses[:, 1:length]
    if length == guesses.shape[1]:
        return guesses
    forced = guesses.clone()
    forced[:, length] = _WRONG
    return forced


def sample_round(
    original: Callable[..., Any], verify_input: Any, batch: Any, output: Any, grammar_mask: Any = None, **rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Hook around SGLang's sampling of a verify pass: (tokens int32 [B * n], lengths and places of an ``Accepted``).

    ``output.next_token_logits`` become those that tokens were sampled from; log-probabilities are made of them. Nothing
    waits for the device.
    """
    if batch.forward_mode.is_idle():
        return original(verify_input, batch, output, grammar_mask, **rest)
    info, rows, logits = batch.sampling_info, verify_input.draft_token_num, output.next_token_logits
    guesses = verify_input.draft_token.view(-1, rows)
    of_request = logits.view(len(guesses), rows, -1)
    penalties = Penalties(guesses, batch.seq_lens, batch.reqs)
    penalties.apply(of_request)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    if info.logit_bias is not None:
        of_request += info.logit_bias[:, None]
    if batch.return_logprob and not info.is_all_greedy:
        logits = logits.clone()  # the sampler makes probabilities of it
    sampled = sample_rows(logits, info, rows, verify_input.positions).view_as(guesses)
    if not info.is_all_greedy:
        parallel.tp_broadcast(sampled)  # equal logits do not give every rank equal sums of probabilities
    accepted = accept_round(guesses, sampled, batch.seq_lens)
    penalties.remember(accepted.lengths)
    return accepted.tokens.flatten(), accepted.lengths, accepted.places


def sample_rows(logits: Tensor, info: Any, rows: int, positions: Tensor | None) -> Tensor:
    """int64 [B * n], by SGLang's sampler, which overwrites ``logits``, fp32 [B * n, vocabulary], unless all are greedy.

    Rows of greedy requests are chosen as the sampler's hook chooses them, which spares the host the sampler.

    Args:
        info: SGLang's, of B requests. rows: n. positions: int64 [B * n]; ``None`` if all are greedy.
    """
    if (tokens := finite_logits.greedy_alone(_sampler(), logits, info, logprobs=False)) is not None:
        return tokens
    sampled: Tensor = _sampler()(scheduling.logits_output(logits), repeated(info, rows), False, [], [], positions)
    return sampled.long()


@functools.cache
def _sampler() -> Any:
    return find("Sampler")()


def repeated(info: Any, rows: int) -> Any:
    """SGLang's ``info`` on how a batch is sampled, each request ``rows`` times."""
    values = {name: getattr(info, name) for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")}
    tensors = {name: None if value is None else value.repeat_interleave(rows, 0) for name, value in values.items()}
    same = ("is_all_greedy", "is_any_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling")
    kept = {name: getattr(info, name) for name in (*same, "vocab_size", "grammars", "device", "max_top_k")}
    return scheduling.sampling_info(**tensors, **kept)


def log_probabilities(original: Callable[..., None], batch: Any, output: Any, predicted: Tensor, **rest: Any) -> None:
    """Hook around SGLang's log-probabilities of a round: a token that is none (:data:`.finite_logits.FAILED`) is 0."""
    original(batch, output, predicted.clamp(min=0), **rest)
