"""Mixture of experts on a GPU; the shared expert is one more group of the experts' products (spec section 6)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nvfp4_sgl.gpu.context import GpuContext
from nvfp4_sgl.gpu.products import ExpertProjection, multiply
from nvfp4_sgl.gpu.step import Scratch
from nvfp4_sgl.model.weights import Matrix, Shard, frozen, load_matrix
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.routing import route_hash, route_topk
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows, swiglu


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer.

    The intermediate dimension of every expert is split over ranks; the result is a partial sum.
    """

    def __init__(self, context: GpuContext, layer: int, scratch: Scratch):
        super().__init__()
        source, config, device = context.source, context.config, context.device
        stem = f"layers.{layer}.ffn"
        self._config, self._arrivals = config, scratch.arrivals
        self._hash = config.is_hash_routed(layer)
        share = context.parallel.share(config.moe_intermediate_size)
        names = [f"{stem}.experts.{index}" for index in range(config.n_routed_experts)] + [f"{stem}.shared_experts"]

        def gate_up() -> Iterator[Matrix]:
            for name in names:
                yield load_matrix(source, [Shard(f"{name}.w1", rows=share), Shard(f"{name}.w3", rows=share)])

        def down() -> Iterator[Matrix]:
            for name in names:
                yield load_matrix(source, [Shard(f"{name}.w2", cols=share)])

        self.w13 = ExpertProjection(gate_up(), len(names), device)
        self.w2 = ExpertProjection(down(), len(names), device)
        self.gate = frozen(source.read(f"{stem}.gate.weight").to(device).bfloat16())
        if self._hash:
            self.tid2eid = frozen(source.read(f"{stem}.gate.tid2eid").to(device))
        else:
            self.bias = frozen(source.read(f"{stem}.gate.bias").to(device).float())

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:
        """bf16 [T, d], this rank's part, from the normalised input x, bf16 [T, d], and the ids of these positions."""
        config, groups = self._config, self.w13.weight.shape[0]
        logits = multiply(x, self.gate, torch.float32)
        # One group more than there are, which nobody visits: where a group begins, the one before it ends.
        routes = Routes.allocate(len(x), config.num_experts_per_tok + 1, groups + 1, 1, x.device)
        places = (config.routed_scaling_factor, routes, self._arrivals)
        if self._hash:
            route_hash(logits, self.tid2eid, token_ids, *places, shared_expert=True)
        else:
            route_topk(logits, self.bias, *places, shared_expert=True)
        ends = routes.offsets[1:]
        copies = scatter_rows(x, routes.destination, x.new_empty(routes.source_row.shape[0], x.shape[1]))
        gate_up = self.w13(copies, ends)
        hidden = swiglu(gate_up, config.swiglu_limit, x.new_empty(gate_up.shape[0], gate_up.shape[1] // 2))
        return finalize(self.w2(hidden, ends), routes.destination, routes.weights, torch.empty_like(x))
