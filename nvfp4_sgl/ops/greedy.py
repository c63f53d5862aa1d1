"""A greedy token of each row of logits, and the rows that no token can be sampled from."""

from __future__ import annotations

from torch import Tensor

FAILED = -1
"""The token of a row that cannot be sampled from."""


def greedy_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Take each row's largest logit; rows that cannot be sampled from become zeros, in place.

    Such a row holds NaN or +inf, or nothing but -inf. Beside a finite logit -inf is no fault: masks of grammars and
    biases leave it.

    Args:
        logits: floating [B, V].

    Returns:
        (int64 [B], the lowest index of the largest logit, or :data:`FAILED`; bool [B], which rows have failed).
    """
    largest = logits.amax(-1)  # NaN if there is one
    failed = (largest - largest) != 0  # NaN of NaN and of infinities
    logits.masked_fill_(failed[:, None], 0)
    return logits.argmax(-1).masked_fill_(failed, FAILED), failed
