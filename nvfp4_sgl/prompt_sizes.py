"""The prompt passes that a server captures in CUDA graphs, for the server and for forecasts of its memory."""

from __future__ import annotations

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.switch import value_of

SWITCH = "NVFP4_SGL_PROMPT_GRAPHS"
"""Environment variable: 1 captures prompts, 0 does not."""

BY_DEFAULT = True
"""Whether a server on a GPU captures prompts unless it is told."""
TOKENS = (256, 512, 1024, 2048)
"""Tokens of the passes that are captured, twice as many each time: of more than 128 less than half is padding. Of more
than the last, the GPU works longer than Python."""
REQUESTS = 16
"""Requests of a captured pass, the padding's included. The compressors have some programs for each."""


def asked() -> bool | None:
    """The value of :data:`SWITCH`; ``None`` if it is not set.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    return value_of(SWITCH)


def check_asked(*, on_gpu: bool) -> None:
    """Refuse a wrong value of :data:`SWITCH`, and prompts that are asked for where no target has graphs; at once.

    Raises:
        ConfigError: as it says.
    """
    if asked() and not on_gpu:
        raise ConfigError(f"{SWITCH}=1: expected a GPU, found none; unset {SWITCH}, or set it to 0")


def planned(chunk: int) -> int:
    """Tokens of the largest prompt pass that a server with this environment would capture on a GPU; 0 if none.

    Args:
        chunk: its ``--chunked-prefill-size``.

    Raises:
        ConfigError: as :func:`asked`.
    """
    wanted = BY_DEFAULT if asked() is None else asked()
    return max((count for count in TOKENS if count <= chunk), default=0) if wanted else 0
