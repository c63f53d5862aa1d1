"""Forced acceptance, to measure rounds of drafts whose guesses mean nothing: :data:`SIMULATED` of SGLang.

The tokens that are accepted are the guesses, and so answers are no longer the target's: :func:`.accept.force_rows`.
``doctor`` checks the setting, so this needs no torch.
"""

from __future__ import annotations

import functools
import logging
import math
import os

from nvfp4_sgl.errors import ConfigError, UnsupportedError

logger = logging.getLogger(__name__)

SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
"""Environment variable of SGLang: mean number of accepted rows of a round, its last token included; off unless set."""
WAYS = {"SGLANG_SIMULATE_ACC_METHOD": "match-expected", "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}
"""Environment variables of SGLang beside it, and the one value of each that rounds here follow."""


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
    if math.isnan(value):
        raise ConfigError(f"{SIMULATED}={text}: expected a number of accepted tokens; unset it")
    return value if value > 0 else None


def check_simulated(rows: int) -> None:
    """Warn if acceptance is simulated, of rounds of ``rows`` rows.

    Raises:
        ConfigError: it is no number from 1 to ``rows``.
        UnsupportedError: a variable of :data:`WAYS` asks for another way.
    """
    value = simulated_length()
    if value is not None and not 1 <= value <= rows:
        raise ConfigError(f"{SIMULATED}={value:g}: expected 1 to {rows}, a round's verified tokens; unset it")
    if value is not None:
        for variable, way in WAYS.items():
            given = os.environ.get(variable) or way
            if given != way:
                raise UnsupportedError(f"{variable}={given}: expected {way}, no other way is implemented; unset it")
        logger.warning(
            "nvfp4_sgl: SIMULATED ACCEPTANCE (%s): a round accepts %g tokens, whatever the model answers: answers mean"
            " nothing; unset it for anything but a measurement",
            SIMULATED, value,
        )  # fmt: skip
