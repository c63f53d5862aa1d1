"""Routing on a GPU (specification §6.1).

The shared expert is a group, which every token visits with weight 1, unless it runs apart. Padding of a captured graph
visits no group, so it costs no expert's weights.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from nvfp4_sgl.config import LayerSpec
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.uniform_experts import UniformExperts
from nvfp4_sgl.targets.fused.gemm_bf16 import multiply_small
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.routing import route_hash, route_topk
from nvfp4_sgl.weights.source import frozen


class RoutedExperts(Protocol):
    """The sizes of the experts that the router needs.

    Attributes:
        has_shared_group: whether the shared expert is the last of the groups.
    """

    has_shared_group: bool

    def new_routes(self, tokens: int) -> Routes:
        """Routes with the groups and the tile that the experts' GEMMs need; contents undefined."""


class FusedRouter(nn.Module):
    """The router: a bf16 GEMM with fp32 logits, then choice, weights and permutation in one operation."""

    def __init__(self, context: Context, layer: LayerSpec, experts: RoutedExperts):
        super().__init__()
        stem, self._config, self._experts = f"{layer.stem}.ffn.gate", context.config, (experts,)
        self.weight = frozen(context.read(f"{stem}.weight").bfloat16())
        self._is_hash = layer.hash_routed
        self._uniform: UniformExperts | None = None
        if self._is_hash:
            self.tid2eid = frozen(context.read(f"{stem}.tid2eid"))
        else:
            if context.uniform_experts:
                self._uniform = UniformExperts(context.config, layer.index, context.device)
            self.bias = frozen(context.read(f"{stem}.bias").float())

    def forward(self, x: Tensor, token_ids: Tensor, step: Step) -> Routes:
        logits = multiply_small(x, self.weight, step)
        (experts,) = self._experts
        routes = experts.new_routes(len(x))
        arguments = (self._config.routed_scaling_factor, routes, step.route_semaphore)
        shared, window_write = experts.has_shared_group, step.plan.window_write
        if self._is_hash:
            route_hash(logits, self.tid2eid, token_ids, *arguments, shared_expert=shared, window_write=window_write)
        elif self._uniform is not None:
            route_hash(*self._uniform.operands(len(x)), *arguments, shared_expert=shared, window_write=window_write)
        else:
            route_topk(logits, self.bias, *arguments, shared_expert=shared, window_write=window_write)
        return routes
