"""The prompt passes that a server captures, by its flags and :data:`SWITCH`."""

from __future__ import annotations

import os

import torch

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.prompt_sizes import BY_DEFAULT, TOKENS
from nvfp4_sgl.serving.sglang import settings

SWITCH = "NVFP4_SGL_PROMPT_GRAPHS"
"""Environment variable: 1 captures prompts, 0 does not."""


def asked() -> bool | None:
    """The value of :data:`SWITCH`; ``None`` if it is not set.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    given = os.environ.get(SWITCH, "")
    if given not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}: expected 0 or 1, found {given!r}; correct it, or unset it")
    return None if not given else given == "1"


def check_asked(*, on_gpu: bool) -> None:
    """Refuse a wrong value of :data:`SWITCH`, and prompts that are asked for where no target has graphs; at once.

    Raises:
        ConfigError: as it says.
    """
    if asked() and not on_gpu:
        raise ConfigError(f"{SWITCH}=1: expected a GPU, found none; unset {SWITCH}, or set it to 0")


def captured_tokens() -> tuple[int, ...]:
    """Tokens of the prompt passes that this server captures; empty if it captures none.

    Raises:
        ConfigError: prompts are asked for by :data:`SWITCH`, and something else stands against it.
    """
    wanted = asked()
    if wanted is False or (wanted is None and not BY_DEFAULT):
        return ()
    against = obstacle()
    if against is None:
        return tuple(count for count in TOKENS if count <= settings.largest_prefill())
    if wanted:
        raise ConfigError(f"{SWITCH}=1: {against}; unset {SWITCH}, or set it to 0")
    return ()


def obstacle() -> str | None:
    """Why this server captures no prompts; ``None`` if it can."""
    if not torch.cuda.is_available():
        return "expected a GPU, found none"
    if settings.has_no_graphs():
        return "expected a server with CUDA graphs, found them disabled (--disable-cuda-graph)"
    if settings.given_arguments(settings.served_arguments())["disable_prefill_cuda_graph"]:
        return "expected graphs of prompts to be allowed, found --disable-prefill-cuda-graph"
    if settings.largest_prefill() < TOKENS[0]:
        return f"expected --chunked-prefill-size {TOKENS[0]} or more, found {settings.largest_prefill()}"
    return None
