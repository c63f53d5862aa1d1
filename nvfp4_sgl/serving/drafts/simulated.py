"""Forced acceptance, to measure rounds of drafts whose guesses mean nothing: :data:`SIMULATED` of SGLang.

The tokens that are accepted are the guesses, and so answers are no longer the target's: :func:`.accept.force_chain`.
``doctor`` checks the setting, so this needs no torch.
"""

from __future__ import annotations

import functools
import os

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
