"""The attention backend of a draft's passes: the target's, over the one window of the draft."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import PassRequest
from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend, window_rows
from nvfp4_sgl.serving.drafts.model import MtpForCausalLM


class DraftBackend(Nvfp4AttentionBackend):
    """Plans prefill and draft extend, which come as the target's prefill and verify do."""

    def require_model(self, model: Any) -> None:
        if not isinstance(model, MtpForCausalLM):
            raise UnsupportedError(
                f"draft: expected {MtpForCausalLM.__name__} of this package, found {type(model).__name__}; leave"
                " SGLANG_EXTERNAL_MODEL_PACKAGE and other plugins out"
            )

    def layer_caches(self, model: Any) -> list[LayerCache]:
        return [LayerCache(window_rows(self.token_to_kv_pool, model.model_config, 0))]

    def warm_up(self, model: Any) -> None:
        """Nothing is compiled where drafts are served."""


class DraftSteps:
    """The backends of the steps that guess further, as SGLang's EAGLE worker takes them: ``attn_backends``.

    Step i writes position L + i of each request and attends up to it. SGLang's own backends leave the positions from L
    on out, so that steps see neither themselves nor the tokens drafted before.
    """

    def __init__(self, backend: DraftBackend, steps: int):
        self.attn_backends = [copy.copy(backend) for _ in range(steps)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan every step of a round."""
        for step, backend in enumerate(self.attn_backends):
            positions = forward_batch.positions + step
            backend.plan = backend.planner.plan(
                PassRequest(positions, forward_batch.req_pool_indices, forward_batch.seq_lens + step + 1)
            )


def create_decode_backend(original: Callable[..., Any], factory: Any) -> DraftSteps | None:
    """Hook around SGLang's choice of a backend for the steps behind the first; one step needs none."""
    steps = factory.speculative_num_steps - 1
    return DraftSteps(factory.draft_model_runner.attn_backend, steps) if steps > 0 else None


def create_extend_backend(original: Callable[..., Any], factory: Any) -> None:
    """Hook around its choice of one for draft extend: the runner keeps its own."""
