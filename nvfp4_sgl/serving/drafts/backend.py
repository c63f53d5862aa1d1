"""The attention backend of a draft's passes: the target's, over the one window of the draft."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import DRAFTED_TOKENS
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Context, PassRequest
from nvfp4_sgl.serving import stages
from nvfp4_sgl.serving.backend import Nvfp4AttentionBackend, window_rows
from nvfp4_sgl.serving.drafts.model import MtpForCausalLM
from nvfp4_sgl.serving.sglang import settings
from nvfp4_sgl.serving.sglang.ledger import find


class DraftBackend(Nvfp4AttentionBackend):
    """Plans prefill and draft extend, which come as the target's prefill and verify do."""

    def require_model(self, model: Any) -> None:
        if not isinstance(model, MtpForCausalLM):
            raise UnsupportedError(
                f"draft: expected {MtpForCausalLM.__name__} of this package, found {type(model).__name__}; leave"
                " SGLANG_EXTERNAL_MODEL_PACKAGE and other plugins out"
            )

    def planned_context(self, model: Any) -> Context:
        """The draft's, with its one layer: a planner of the target's layers would reserve room for index scores."""
        context: Context = model.context
        config = replace(context.config, num_hidden_layers=1, layer_kinds=(LayerKind.SWA,))
        return replace(context, config=config)

    def layer_caches(self, model: Any) -> list[LayerCache]:
        return [LayerCache(window_rows(self.token_to_kv_pool, model.model_config, 0))]

    def warm_up(self, model: Any) -> None:
        with stages.stage("draft warm-up"):
            self.planner.warm_up(model.draft, model.vocabulary[0].weight, settings.largest_prefill())

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Lengths of padding are those behind a draft extend, which has so many rows at most."""
        return DRAFTED_TOKENS


class DraftSteps:
    """The backends of the steps that guess further, as SGLang's EAGLE worker takes them: ``attn_backends``.

    Step i writes position L + i of each request and attends up to it. SGLang's own backends leave the positions from L
    on out, so that steps see neither themselves nor the tokens drafted before.
    """

    needs_cpu_seq_lens = False

    def __init__(self, backend: DraftBackend, steps: int):
        self._planner = backend.planner
        self.attn_backends = [copy.copy(backend) for _ in range(steps)]
        self._captured: list[list[PassRequest]] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan every step of an eager round."""
        for step, backend in enumerate(self.attn_backends):
            backend.plan = self._planner.plan(step_request(forward_batch, forward_batch.positions + step))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs of up to ``max_num_tokens`` tokens a step share."""
        self._planner.reserve(max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a capture of all steps: room for each, with positions of its own; SGLang's count up as steps run.

        It stays allocated as long as this object, for the graph holds its addresses.
        """
        if in_capture:
            positions = [torch.empty_like(forward_batch.positions) for _ in self.attn_backends]
            requests = [step_request(forward_batch, each) for each in positions]
            for backend, request in zip(self.attn_backends, requests, strict=True):
                backend.plan = self._planner.capture(request)
            self._captured.append(requests)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record the plans of all steps: what they read of the tables of slots is read before the first one runs."""
        for step, (backend, request) in enumerate(zip(self.attn_backends, self._captured[-1], strict=True)):
            torch.add(forward_batch.positions, step, out=request.positions)
            torch.add(request.positions, 1, out=request.ends)
            self._planner.fill(backend.plan, request)


def step_request(forward_batch: Any, positions: Tensor) -> PassRequest:
    """The pass of a step at ``positions``, int64 [B], which each request sees up to."""
    return PassRequest(positions, forward_batch.req_pool_indices, positions + 1)


def create_decode_backend(original: Callable[..., Any], factory: Any) -> DraftSteps | None:
    """Hook around SGLang's choice of a backend for the steps behind the first; one step needs none."""
    steps = factory.speculative_num_steps - 1
    return DraftSteps(factory.draft_model_runner.attn_backend, steps) if steps > 0 else None


def create_extend_backend(original: Callable[..., Any], factory: Any) -> DraftBackend:
    """Hook around its choice of one for draft extend: the runner's own, whose passes are captured where graphs are."""
    backend: DraftBackend = factory.draft_model_runner.attn_backend
    find("TRTLLMMLABackend").register(DraftBackend)
    return backend
