"""The prompt passes that a server captures, by its flags and :data:`~nvfp4_sgl.prompt_sizes.SWITCH`."""

from __future__ import annotations

import torch

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.prompt_sizes import BY_DEFAULT, SWITCH, TOKENS, asked
from nvfp4_sgl.serving.sglang import settings


def captured_tokens() -> tuple[int, ...]:
    """Tokens of the prompt passes that this server captures; empty if it captures none.

    Raises:
        ConfigError: prompts are asked for by ``SWITCH``, and something else stands against it.
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
