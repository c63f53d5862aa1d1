"""From accumulators to outputs: ``(acc * 2^VALUE_SHIFT) * alpha`` in fp32, one rounding, stored by TMA.

A warp owns 16 weight rows. Of each group of eight tokens thread l has tokens 2 (l % 4) and 2 (l % 4) + 1 of rows l / 4
and l / 4 + 8 (``..common.fragment``).
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
from .expand import VALUE_SHIFT
from .shape import WARP_ROWS, WARPGROUP_ROWS, KernelShape

ROWS_OF_THREAD = 2


@dataclass(frozen=True)
class Epilogue(Fixed):
    """What happens to a tile: so far its factors alone."""

    def host(self, shape: KernelShape, arguments: Any) -> Any:
        """Tensors and tensor maps for the kernel, of the launch's traced ``Arguments``."""
        a = arguments
        target = PlainStore.host(shape, a.out, a.features, a.rows, a.groups, a.out_row, a.out_group)
        return target, cute.make_tensor(
            a.alpha, cute.make_layout((a.features, a.groups), stride=(a.alpha_feature, a.alpha_group))
        )

    def device(self, shape: KernelShape, storage: Any, outputs: Any, warp: EpilogueWarp) -> Any:
        """The epilogue inside the kernel, for one warp."""
        target, alphas = outputs
        store = PlainStore.create(shape, storage, target, warp)
        return DeviceEpilogue(shape, alphas, store, warp)


@dataclass(frozen=True)
class DeviceEpilogue(Fixed):
    """For one warp: each tile ``factors``, then ``chunk`` after chunk."""

    shape: KernelShape
    alphas: Any
    store: Any
    warp: EpilogueWarp

    @cute.jit
    def factors(self, feature_tile, group):
        """Alphas of this thread's two rows; beyond the last feature any will do."""
        first = feature_tile * (2 * WARPGROUP_ROWS) + self.warp.index * WARP_ROWS + self.warp.lane // 4
        rows = [cutlass.min(first + 8 * i, self.alphas.shape[0] - 1) for i in range(ROWS_OF_THREAD)]
        return tuple(self.alphas[row, group] * Float32(2.0**VALUE_SHIFT) for row in rows)

    def chunk(
        self, values: Any, factors: Any, slot: Any, chunk: Any, feature_tile: Any, token_tile: Any, token_group: Any,
        inside: Any,
    ) -> None:  # fmt: skip
        """Finish one chunk: ``values`` are this thread's of it."""
        for i in range(ROWS_OF_THREAD):
            for first in values_of(self.shape.chunk, i):
                values[first] = values[first] * factors[i]
                values[first + 1] = values[first + 1] * factors[i]
        # To the store a team's features are a tile of their own.
        tile = feature_tile * self.shape.teams + self.warp.team
        self.store.put(values, slot, chunk, tile, token_tile, token_group, inside)

    def finish(self) -> None:
        """After the last tile."""
        self.store.finish()
