"""DeepSeek-V4 attention: SWA, CSA and HCA layers (specification §3 to 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.config import LayerSpec
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.weights.layout import attention_matrices


class Attention(nn.Module):
    """One layer's attention. Holds this rank's heads and o-groups; returns a partial sum over ranks.

    Attributes:
        projects_all: multiply index queries in every pass, also where nothing reads them; for who observes them.
    """

    projects_all = False

    def __init__(self, context: Context, layer: LayerSpec):
        super().__init__()
        target = context.boundaries
        matrices = attention_matrices(context.config, layer, context.parallel)
        self.project_x = target.project_input(context, matrices.from_x, matrices.index_weights)
        self.prepare = target.prepare_attention(context, layer)
        self.project_q = target.project(context, matrices.from_q)
        self.select = target.select(context, layer) if layer.selects else None
        self.attend = target.attend(context, layer)
        self.wo_a = target.project_groups(context, matrices.wo_a, matrices.groups)
        self.wo_b = target.project(context, [matrices.wo_b])
        self._send: Callable[[Activation, Sequence[Tensor]], Tensor] | None = getattr(self.wo_b, "send", None)

    @property
    def takes(self) -> Form:
        """The form in which the layer reads its input."""
        return self.project_x.takes

    @property
    def sends(self) -> bool:
        """Whether the output can be stored in several tensors at once."""
        return self._send is not None

    def forward(self, x: Activation, step: object, cache: LayerCache, places: Sequence[Tensor] = ()) -> Tensor:
        """[T, d], this rank's part of the output, from the normalised input; stored in all of ``places``, if any.

        All of this pass's cache writes come before any read, so that a query sees the window that it completes.
        """
        prepared = self.prepare(self.project_x(x), x, step, cache, self.project_q.takes)
        if self.select is None or self.projects_all or self.select.scores(step):
            q, *index_q = self.project_q(prepared.q_lora)
        else:
            (q,), index_q = self.project_q(prepared.q_lora, 1), []
        entries = None
        if self.select is not None:
            assert prepared.index_weights is not None
            entries = self.select(index_q[0] if index_q else None, prepared.index_weights, step, cache)
        o = self.wo_a(self.attend(q, step, cache, entries, self.wo_a.takes), self.wo_b.takes)
        if places:
            assert self._send is not None
            return self._send(o, places)
        (output,) = self.wo_b(o)
        return output
