"""From accumulators to outputs: ``(acc * 2^shift) * alpha`` in fp32, SwiGLU if gated, one rounding, a TMA store
to each tensor that gets the result.

A warp owns 16 weight rows. Of each group of eight tokens thread l has tokens 2 (l % 4) and 2 (l % 4) + 1 of rows l / 4
and l / 4 + 8 (``..common.fragment``). In a gated kernel these rows are a gate and the up of the same feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..common.fixed import Fixed
from ..common.fragment import EpilogueWarp, values_of
from ..common.store import PlainStore
from ..common.swiglu import clamped_swiglu
from .expand import VALUE_SHIFT
from .fp8_expand import FP8_VALUE_SHIFT
from .shape import WARP_ROWS, WARPGROUP_ROWS, KernelShape

ROWS_OF_THREAD = 2
VALUE_SHIFTS = {"nvfp4": VALUE_SHIFT, "fp8": FP8_VALUE_SHIFT}
"""Expanded weights are their values divided by two to this power, by how they are stored."""


@dataclass(frozen=True)
class Epilogue(Fixed):
    """The epilogue of a tile.

    Attributes:
        limit: the SwiGLU clamp of a gated kernel, else None.
    """

    limit: float | None = None

    def host(self, shape: KernelShape, arguments: Any, batch: Any) -> Any:
        """Tensors and tensor maps for the kernel, of the launch's traced ``Arguments`` and the outputs' groups."""
        a = arguments
        outputs = a.features // shape.rows_per_feature
        # Stores to other GPUs take longest: issue them first.
        targets = tuple(
            PlainStore.host(shape, out, outputs, a.rows, batch, a.out_row, a.out_group)
            for out in (*a.copies[: shape.copies], a.out)
        )
        alphas = cute.make_layout((a.features, a.groups), stride=(a.alpha_feature, a.alpha_group))
        return targets, cute.make_tensor(a.alpha, alphas)

    def device(self, shape: KernelShape, storage: Any, outputs: Any, warp: EpilogueWarp) -> Any:
        """The epilogue inside the kernel, for one warp."""
        targets, alphas = outputs
        store = PlainStore.create(shape, storage, targets, warp)
        return DeviceEpilogue(shape, self, alphas, store, warp)


@dataclass(frozen=True)
class DeviceEpilogue(Fixed):
    """For one warp: each tile ``factors``, then ``chunk`` after chunk."""

    shape: KernelShape
    epilogue: Epilogue
    alphas: Any
    store: Any
    warp: EpilogueWarp

    @cute.jit
    def factors(self, feature_tile, group):
        """Alphas of this thread's two rows; beyond the last feature any will do."""
        shape = self.shape
        if cutlass.const_expr(shape.gated):
            rows = [0, 1]
        elif cutlass.const_expr(shape.grouped):
            rows = [0, 0]
        else:
            first = feature_tile * (2 * WARPGROUP_ROWS) + self.warp.index * WARP_ROWS + self.warp.lane // 4
            rows = [cutlass.min(first + 8 * i, self.alphas.shape[0] - 1) for i in range(ROWS_OF_THREAD)]
        return tuple(self.alphas[row, group] * Float32(2.0 ** VALUE_SHIFTS[shape.weights]) for row in rows)

    def chunk(
        self, values: Any, factors: Any, slot: Any, chunk: Any, feature_tile: Any, token_tile: Any, token_group: Any,
        inside: Any,
    ) -> None:  # fmt: skip
        """Finish one chunk: ``values`` are this thread's of it."""
        for i in range(ROWS_OF_THREAD):
            for first in values_of(self.shape.chunk, i):
                values[first] = values[first] * factors[i]
                values[first + 1] = values[first + 1] * factors[i]
        if self.epilogue.limit is not None:
            self._join(values, self.epilogue.limit)
        # To the store a team's features are a tile of their own.
        tile = feature_tile * self.shape.teams + self.warp.team
        self.store.put(values, slot, chunk, tile, token_tile, token_group, inside)

    def _join(self, values: Any, limit: float) -> None:
        """Gates and ups to hidden values, in place of the gates."""
        gates, ups = (values_of(self.shape.chunk, i) for i in range(ROWS_OF_THREAD))
        for gate, up in zip(gates, ups, strict=True):
            for token in range(2):
                values[gate + token] = clamped_swiglu(values[gate + token], values[up + token], limit)

    def skip(self) -> None:
        """Skip a chunk that holds no token, and its buffer."""
        self.store.skip()

    def finish(self) -> None:
        """After the last tile."""
        self.store.finish()
