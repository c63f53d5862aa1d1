"""Makes and accepts guesses of DSpark's rounds, the latter by :mod:`.accept`, in SGLang's DSpark worker.

Arguments are those of the functions that these hooks stand around. The worker applies the mask of a grammar between the
last two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.model.contract import DsparkGuesses
from nvfp4_sgl.serving.drafts.accept import accept_round, sample_rows
from nvfp4_sgl.serving.drafts.penalties import Penalties
from nvfp4_sgl.serving.sglang import parallel, scheduling


def guess(
    original: Callable[..., Any], *, markov_head: DsparkGuesses, base_logits: Tensor, anchor_tokens: Tensor, **rest: Any
) -> tuple[Tensor, None]:
    """Hook in place of SGLang's loop over a block's tokens: (int64 [B, block], no logits, which nobody asks for).

    Where there are CUDA graphs it is part of the draft's.
    """
    return markov_head.choose(base_logits, anchor_tokens), None


def verify(
    original: Callable[..., Any], executor: Any, *, batch: Any, verify_ids_2d: Tensor, sampling_info: Any, **rest: Any
) -> Any:
    """Hook around a verify pass: its logits come with the penalties of each row, and with the request's bias."""
    result = original(executor, batch=batch, verify_ids_2d=verify_ids_2d, sampling_info=None, **rest)
    logits, (requests, rows) = result.logits_output.next_token_logits, verify_ids_2d.shape
    of_request = logits.view(requests, rows, -1)
    executor.nvfp4_sgl_penalties = Penalties(verify_ids_2d, batch.seq_lens, batch.reqs)
    executor.nvfp4_sgl_penalties.apply(of_request)
    if sampling_info.logit_bias is not None:
        of_request += sampling_info.logit_bias[:, None]
    return result


def accept(
    original: Callable[..., Any],
    executor: Any,
    *,
    verify_ids_2d: Tensor,
    target_logits: Tensor,
    sampling_info: Any,
    prefix_lens: Tensor,
    **rest: Any,
) -> Any:
    """Hook around the acceptance of a round. What a row has sampled is the guess behind it where that is accepted."""
    greedy, rows = sampling_info.is_all_greedy, verify_ids_2d.shape[1]
    # Positions are read where a token is drawn by a seed. A copy, for log-probabilities: the sampler makes
    # probabilities of it.
    positions = None if greedy else (prefix_lens[:, None] + torch.arange(rows, device=prefix_lens.device)).flatten()
    logits = target_logits if greedy else target_logits.clone()
    sampled = sample_rows(logits, sampling_info, rows, positions).view_as(verify_ids_2d)
    if not greedy:
        parallel.tp_broadcast(sampled)  # equal logits do not give every rank equal sums of probabilities
    accepted = accept_round(verify_ids_2d, sampled, prefix_lens)
    executor.nvfp4_sgl_penalties.remember(accepted.lengths)
    return scheduling.accepted_block(
        correct_len=accepted.right,
        bonus=accepted.last,
        cap_trim_lens=none_trimmed(accepted.lengths),
        commit_lens=accepted.lengths,
        new_seq_lens=accepted.ends,
        out_tokens=sampled,
    )


_zeros: dict[torch.device, Tensor] = {}


def none_trimmed(lengths: Tensor) -> Tensor:
    """Rows that were not verified: zeros like ``lengths``, int32 [B], which nobody writes. Held between rounds."""
    found = _zeros.get(lengths.device)
    if found is None or len(found) < len(lengths):
        found = _zeros[lengths.device] = lengths.new_zeros(max(1024, 2 * len(lengths)))
    return found[: len(lengths)]
