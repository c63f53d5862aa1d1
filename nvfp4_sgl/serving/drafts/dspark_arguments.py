"""SGLang's arguments of DSpark on a CPU, for which SGLang itself refuses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving import arguments
from nvfp4_sgl.serving.flags.kernels import BACKEND
from nvfp4_sgl.serving.sglang import settings


def resolve(original: Callable[[Any], None], server_args: Any) -> None:
    """Hook around SGLang's resolution of them: beside :func:`.checks.declared`, what it does on a GPU, and in EAGLE's
    case on a CPU.
    """
    given = settings.resolving(server_args)
    if given.device != "cpu" or not arguments.is_our_checkpoint(given.model_path):
        original(server_args)
        return
    settings.declare(
        server_args,
        BACKEND,
        speculative_draft_model_path=given.model_path,
        speculative_draft_model_revision=given.revision,
        disable_overlap_schedule=True,
    )
