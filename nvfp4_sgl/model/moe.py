"""Mixture of experts with a shared expert (specification §6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        self._send: Callable[..., Tensor] | None = getattr(self.experts, "send", None)

    @property
    def takes(self) -> Form:
        """The form in which the sublayer reads its input; the router reads values."""
        return self.experts.takes | Form.VALUES

    @property
    def sends(self) -> bool:
        """Whether the output can be stored in several tensors at once."""
        return self._send is not None

    def forward(self, x: Activation, token_ids: Tensor, step: object, places: Sequence[Tensor] = ()) -> Tensor:
        """[T, d], this rank's part, from the normalised input and the ids of these positions, int [T].

        Stored in all of ``places``, if any.
        """
        routes = self.route(x.require_values(), token_ids, step)
        if places:
            assert self._send is not None
            return self._send(x, routes, step, places)
        return self.experts(x, routes, step)
