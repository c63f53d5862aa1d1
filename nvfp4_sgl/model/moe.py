"""Mixture of experts with a shared expert (specification §6)."""

from __future__ import annotations

from torch import Tensor, nn

from nvfp4_sgl.config import LayerSpec
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.weights.layout import expert_matrices


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer.

    The intermediate dimension of every expert is split over ranks; the result is a partial sum.
    """

    def __init__(self, context: Context, layer: LayerSpec):
        super().__init__()
        matrices = expert_matrices(context.config, layer, context.parallel)
        self.experts = context.boundaries.experts(context, matrices)
        self.route = context.boundaries.route(context, layer, self.experts)

    @property
    def takes(self) -> Form:
        """The form in which the sublayer reads its input; the router reads values."""
        return self.experts.takes | Form.VALUES

    def forward(self, x: Activation, token_ids: Tensor, step: object) -> Tensor:
        """[T, d], this rank's part, from the normalised input and the ids of these positions, int [T]."""
        return self.experts(x, self.route(x.require_values(), token_ids, step), step)
