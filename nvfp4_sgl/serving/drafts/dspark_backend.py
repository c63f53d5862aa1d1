"""The attention backend of DSpark's blocks, over the windows of its stages; and its worker in the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest
from nvfp4_sgl.serving import stages
from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend, window_rows
from nvfp4_sgl.serving.drafts.dspark_model import DsparkForCausalLM
from nvfp4_sgl.serving.flags.kernels import BACKEND
from nvfp4_sgl.serving.sglang import settings


class DsparkBackend(Nvfp4AttentionBackend):
    """Plans blocks: SGLang runs them, and captures them, as a verify pass of the draft, with the lengths in front of
    them."""

    def require_model(self, model: Any) -> None:
        if not isinstance(model, DsparkForCausalLM):
            raise UnsupportedError(
                f"draft: expected {DsparkForCausalLM.__name__} of this package, found {type(model).__name__}; leave"
                " SGLANG_EXTERNAL_MODEL_PACKAGE and other plugins out"
            )

    def layer_caches(self, model: Any) -> list[LayerCache]:
        return [
            LayerCache(window_rows(self.token_to_kv_pool, model.model_config, stage))
            for stage in range(model.num_stages)
        ]

    def planned_context(self, model: Any) -> Context:
        """The draft's, with its stages for layers."""
        context: Context = model.context
        kinds = (LayerKind.SWA,) * model.num_stages
        return replace(context, config=replace(context.config, num_hidden_layers=len(kinds), layer_kinds=kinds))

    def warm_up(self, model: Any) -> None:
        with stages.stage("draft warm-up"):
            self.planner.warm_up(model.draft, model.vocabulary[0].weight, settings.largest_prefill())

    def request(self, forward_batch: Any) -> PassRequest:
        lengths, block = forward_batch.seq_lens, forward_batch.spec_info.draft_token_num
        return PassRequest(
            forward_batch.positions,
            forward_batch.req_pool_indices,
            lengths + block,
            PassKind.BLOCK,
            tokens_each=block,
        )


def create_worker(original: Callable[..., Any], **rest: Any) -> Any:
    """Hook around SGLang's creation of the draft's worker: on the backend of our name."""
    return original(**rest | {"attention_backend_override": BACKEND})


def run_round(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around a round: lengths on the host are recorded on no stream."""
    if not batch.seq_lens.is_cuda:
        batch.seq_lens.record_stream = lambda stream: None
    return original(worker, batch, *args, **kwargs)
