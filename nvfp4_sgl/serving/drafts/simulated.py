"""Forced acceptance, to measure rounds of drafts whose guesses mean nothing: :data:`SIMULATED` of SGLang.

The tokens that are accepted are the guesses, and so answers are no longer the target's.
"""

from __future__ import annotations

import functools
import math
import os
import random

import torch
from torch import Tensor

from nvfp4_sgl.errors import ConfigError

SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
"""Environment variable of SGLang: mean number of accepted rows of a round, its last token included; off unless set."""


@functools.cache
def simulated_length() -> float | None:
    """:data:`SIMULATED`; ``None`` if it is not set, or not positive, which is off.

    Raises:
        ConfigError: it is no number.
    """
    text = os.environ.get(SIMULATED) or "-1"
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"{SIMULATED}={text}: expected a number of accepted tokens; unset it") from error
    return value if value > 0 else None


def check_simulated(rows: int) -> float | None:
    """:func:`simulated_length` of rounds of ``rows`` rows.

    Raises:
        ConfigError: it is no number from 1 to ``rows``.
    """
    value = simulated_length()
    if value is not None and not 1 <= value <= rows:
        raise ConfigError(f"{SIMULATED}={value:g}: expected 1 to {rows}, the rows of a round; unset it")
    return value


_draws = random.Random(0)
"""The same on every rank."""


def force_chain(guesses: Tensor, sampled: Tensor, expected: float) -> tuple[Tensor, Tensor]:
    """Accept so many rows of every request: as many as ``expected``, rounded up or down by one draw.

    Makes the accepted guesses the rows' tokens in ``sampled``; what is returned and the arguments are as of
    :func:`.accept.accept_chain`.
    """
    requests, rows = guesses.shape
    length = math.floor(expected)
    length += _draws.random() < expected - length
    sampled[:, : length - 1] = guesses[:, 1:length]
    lengths = torch.full((requests,), length, dtype=torch.int32, device=guesses.device)
    return lengths, accepted_places(lengths, rows)


def accepted_places(lengths: Tensor, rows: int) -> Tensor:
    """Places in the batch of the accepted rows, int32 [B, n], -1 padded; the first ``lengths``, int [B], of each n."""
    row = torch.arange(rows, device=lengths.device)
    first = torch.arange(len(lengths), device=lengths.device)[:, None] * rows
    return torch.where(row < lengths[:, None], first + row, -1).int()
