"""Mixture of experts on the CPU (specification §6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from nvfp4_sgl.cache.plan import BatchPlan
from nvfp4_sgl.checkpoint.decoders import Matrix
from nvfp4_sgl.config import LayerSpec
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.model.uniform_experts import UniformExperts
from nvfp4_sgl.ops.linear import PreparedWeight
from nvfp4_sgl.ops.moe import expert_mlp, route_hash, route_topk, route_weights, routed_experts
from nvfp4_sgl.targets.reference.projections import working_copy
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.matrix import load_matrix, stack
from nvfp4_sgl.weights.source import WeightSource, frozen


@dataclass(frozen=True)
class Choices:
    """Each token's experts, int64 [T, k], and their weights, fp32 [T, k]."""

    experts: Tensor
    weights: Tensor


class ReferenceRouter(nn.Module):
    """Choose experts: in the first layers by the token's id, in the others by biased scores."""

    def __init__(self, context: Context, layer: LayerSpec, experts: object):
        super().__init__()
        stem, self._config = f"{layer.stem}.ffn.gate", context.config
        self.weight = frozen(context.read(f"{stem}.weight"))
        self._is_hash = layer.hash_routed
        self._uniform: UniformExperts | None = None
        if self._is_hash:
            self.tid2eid = frozen(context.read(f"{stem}.tid2eid"))
        else:
            if context.uniform_experts:
                self._uniform = UniformExperts(context.config, layer.index, context.device)
            self.bias = frozen(context.read(f"{stem}.bias"))

    def forward(self, x: Tensor, token_ids: Tensor, step: BatchPlan) -> Choices:
        config, scaling = self._config, self._config.routed_scaling_factor
        if self._is_hash:
            return Choices(*route_hash(x, self.weight, self.tid2eid, token_ids, scaling))
        if self._uniform is not None:
            logits, table, bases = self._uniform.operands(len(x))
            experts = table[bases].long()
            return Choices(experts, route_weights(softplus(logits).sqrt(), experts, scaling))
        return Choices(*route_topk(x, self.weight, self.bias, config.num_experts_per_tok, scaling))


class ReferenceExperts(nn.Module):
    """Routed experts as two batched GEMMs, the shared expert apart."""

    takes = Form.VALUES

    def __init__(self, context: Context, matrices: Sequence[ExpertMatrices]):
        super().__init__()
        source, self._limit, self._mode = context.source, context.config.swiglu_limit, context.mode
        *routed, shared = matrices
        held = context.parallel.experts(context.config).routed
        self._groups = torch.full((context.config.n_routed_experts,), -1, device=context.device)
        self._groups[list(held)] = torch.arange(len(held), device=context.device)
        names = [expert.down.stem for expert in routed]
        w13 = stack([load_matrix(source, expert.gate_up) for expert in routed], names)
        w2 = stack([load_matrix(source, [expert.down]) for expert in routed], names)
        self._routed = _working_copies(source, routed[0], w13, w2)
        shared_w13, shared_w2 = load_matrix(source, shared.gate_up), load_matrix(source, [shared.down])
        self._shared = _working_copies(source, shared, shared_w13, shared_w2)

    def forward(self, x: Activation, routes: Choices, step: BatchPlan) -> Tensor:
        """fp32 [T, d]; a token's experts that are other ranks' have weight 0."""
        values, groups = x.require_values(), self._groups[routes.experts]
        weights = routes.weights * (groups >= 0)
        routed = routed_experts(values, groups.clamp(min=0), weights, *self._routed, self._limit, self._mode)
        return routed + expert_mlp(values, *self._shared, self._limit, self._mode, values.dtype)


def _working_copies(
    source: WeightSource, expert: ExpertMatrices, w13: Matrix, w2: Matrix
) -> tuple[PreparedWeight, PreparedWeight]:
    """Gate with up, and down, of experts that are all stored as ``expert`` is.

    Activations are quantised to MXFP8 where gate and up both are FP8 with UE8M0 scales.
    """
    of_gate_up = {source.storage(shard.stem) for shard in expert.gate_up}
    gate_up = of_gate_up.pop() if len(of_gate_up) == 1 else None
    return working_copy(w13, gate_up), working_copy(w2, source.storage(expert.down.stem))
