"""Mixture of experts with a shared expert (spec section 6)."""

from __future__ import annotations

from torch import Tensor, nn

from nvfp4_sgl.model.context import ModelContext
from nvfp4_sgl.model.weights import Matrix, Shard, frozen, load_matrix, stack


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer.

    The intermediate dimension of every expert is split over ranks; the result is a partial sum.
    """

    def __init__(self, context: ModelContext, layer: int):
        super().__init__()
        reader, config = context.source, context.config
        stem = f"layers.{layer}.ffn"
        self._config, self._ops, self._mode = config, context.ops, context.mode
        self._hash = config.is_hash_routed(layer)
        share = context.parallel.share(config.moe_intermediate_size)

        def w13(expert: str) -> Matrix:
            return load_matrix(reader, [Shard(f"{expert}.w1", rows=share), Shard(f"{expert}.w3", rows=share)])

        def w2(expert: str) -> Matrix:
            return load_matrix(reader, [Shard(f"{expert}.w2", cols=share)])

        experts = [f"{stem}.experts.{index}" for index in range(config.n_routed_experts)]
        self.w13 = stack([w13(expert) for expert in experts], experts)
        self.w2 = stack([w2(expert) for expert in experts], experts)
        self.shared_w13, self.shared_w2 = w13(f"{stem}.shared_experts"), w2(f"{stem}.shared_experts")
        self._routed = self.w13.operand(), self.w2.operand()
        self._shared = self.shared_w13.operand(), self.shared_w2.operand()
        self.gate = frozen(reader.read(f"{stem}.gate.weight"))
        if self._hash:
            self.tid2eid = frozen(reader.read(f"{stem}.gate.tid2eid"))
        else:
            self.bias = frozen(reader.read(f"{stem}.gate.bias"))

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """fp32 [T, d], this rank's part, from the normalised input x [T, d] and the ids of these positions [T]."""
        config, ops = self._config, self._ops
        if self._hash:
            experts, weights = ops.route_hash(x, self.gate, self.tid2eid, token_ids, config.routed_scaling_factor)
        else:
            experts, weights = ops.route_topk(
                x, self.gate, self.bias, config.num_experts_per_tok, config.routed_scaling_factor
            )
        routed = ops.routed_experts(x, experts, weights, *self._routed, config.swiglu_limit, self._mode)
        return routed + ops.expert_mlp(x, *self._shared, config.swiglu_limit, self._mode, x.dtype)
