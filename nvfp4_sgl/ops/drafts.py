"""Draft models (specification §7): what MTP and DSpark have of their own besides ordinary blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def mtp_streams(from_token: Tensor, from_streams: Tensor) -> Tensor:
    """Input of the MTP block: ``y_k = e_proj(enorm(E[t])) + h_proj(hnorm(x_k))`` for every stream k.

    Args:
        from_token: fp32 [T, d], ``e_proj(enorm(E[t]))``, shared by all streams.
        from_streams: fp32 [T, n, d], ``h_proj(hnorm(x))``.

    Returns:
        fp32 [T, n, d].
    """
    return from_token.unsqueeze(1) + from_streams


def stream_mean(streams: Tensor) -> Tensor:
    """Mean of the streams [T, n, d] behind a layer, which DSpark reads of the target: fp32 [T, d]."""
    return streams.float().mean(1)


def markov_bias(previous: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """DSpark's bias of logits by the token before: ``w2 @ w1[previous]``.

    Args:
        previous: int [...], token ids.
        w1: [vocabulary, r]. w2: [vocabulary, r].

    Returns:
        fp32 [..., vocabulary].
    """
    return w1[previous].float() @ w2.float().t()


def draft_greedily(base: Tensor, anchor: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """DSpark's tokens: one after the other, each the likeliest behind the one before.

    Args:
        base: [B, block, vocabulary], logits of the block's positions. anchor: int [B], the token in front of it; an id
            outside of the vocabulary, as a request that has failed has, counts as its end.
        w1, w2: as of :func:`markov_bias`.

    Returns:
        int64 [B, block]. Of equal logits the lowest token; NaN counts as -inf, and where all are, the guess is 0.
    """
    before, tokens = anchor.clamp(0, len(w1) - 1), list[Tensor]()
    for logits in base.float().unbind(1):
        biased = logits + markov_bias(before, w1, w2)
        before = biased.masked_fill(biased.isnan(), -torch.inf).argmax(-1)
        tokens.append(before)
    return torch.stack(tokens, dim=1)


class Accepted(NamedTuple):
    """The rows that a round of B requests with n rows each accepts.

    Attributes:
        lengths: int32 [B], accepted rows, 1 to n: those in front of the first wrong guess.
        right: int32 [B], the guesses among their tokens, one less.
        places: int32 [B, n], places of the accepted rows among all B * n, -1 padded.
        tokens: int32 [B, n], what the rows have answered.
        last: int64 [B], the answer of the last accepted row, which the next round begins with.
        ends: int64 [B], tokens whose keys are cached behind the round.
    """

    lengths: Tensor
    right: Tensor
    places: Tensor
    tokens: Tensor
    last: Tensor
    ends: Tensor


def accept_guesses(guesses: Tensor, answers: Tensor, starts: Tensor) -> Accepted:
    """Accept the guesses that the target has answered itself, up to the first wrong one.

    Args:
        guesses: int [B, n], the token of each row; the first is decided.
        answers: int [B, n], what the target answers each row with.
        starts: int64 [B], tokens whose keys were cached in front of the round.
    """
    right = guesses[:, 1:] == answers[:, :-1]
    lengths = 1 + right.long().cumprod(1).sum(1)
    requests, rows = answers.shape
    row = torch.arange(rows, device=answers.device)
    first = torch.arange(requests, device=answers.device)[:, None] * rows
    return Accepted(
        lengths=lengths.int(),
        right=lengths.int() - 1,
        places=torch.where(row < lengths[:, None], first + row, -1).int(),
        tokens=answers.int(),
        last=answers.gather(1, lengths[:, None] - 1)[:, 0].long(),
        ends=starts + lengths,
    )


def confidence(x: Tensor, previous: Tensor, w1: Tensor, projection: Tensor) -> Tensor:
    """DSpark's estimate that a token will be accepted: ``sigmoid(p . [x, w1[previous]])``.

    Args:
        x: [T, d], the final collapse's output, not normalised.
        previous: int [T]. w1: [vocabulary, r]. projection: fp32 [1, d + r].

    Returns:
        fp32 [T].
    """
    read = torch.cat([x.float(), w1[previous].float()], dim=-1)
    return torch.sigmoid(read @ projection.float().t()).squeeze(-1)
