"""Plans of passes on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.plan import Batch, BatchPlan, plan_batch
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest, Slots


class ReferencePlanner:
    """A step is a :class:`~nvfp4_sgl.cache.plan.BatchPlan`; nothing is captured."""

    def __init__(self, context: Context, slots: Slots, caches: Sequence[LayerCache]):
        self._slots, self._window = slots, context.config.sliding_window
        self._ratios = frozenset(kind.value for kind in context.config.layer_kinds if kind is not LayerKind.SWA)

    def plan(self, request: PassRequest) -> BatchPlan:
        ends, requests = request.ends.long(), request.requests.long()
        added = request.tokens_each if request.added is None else request.added.long()
        full_slots = self._slots.table[requests, : int(ends.max())].long()
        batch = Batch(ends - added, ends, requests, full_slots, self._slots.full_to_swa)
        return plan_batch(
            batch,
            window=self._window,
            ratios=self._ratios,
            is_block=request.kind is PassKind.BLOCK,
            rings=self._slots.rings,
        )

    def reserve(self, tokens: int) -> None:
        """Nothing to allocate: this target is eager."""

    def capture(self, request: PassRequest) -> BatchPlan:
        raise UnsupportedError("CUDA graphs: the CPU target has none; leave --cuda-graph flags out")

    def fill(self, step: BatchPlan, request: PassRequest) -> None:
        self.capture(request)

    def warm_up(self, decoder: object, table: Tensor, tokens: int) -> None:
        """Nothing is compiled."""
