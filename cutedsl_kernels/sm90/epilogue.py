"""From accumulators to outputs: ``(acc * 2^VALUE_SHIFT) * alpha`` in fp32, one rounding, stored by TMA.

A warp owns 16 weight rows. Of each group of eight tokens thread l has tokens 2 (l % 4) and 2 (l % 4) + 1 of rows l / 4
and l / 4 + 8: what a warp of SM100's epilogue has of half its rows (sm100/fragment.py), so its store serves here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..sm100.fixed import Fixed
from ..sm100.fragment import values_of
from ..sm100.store import PlainStore
from .expand import VALUE_SHIFT
from .shape import WARP_LANES, WARP_ROWS, WARPGROUP_ROWS, KernelShape

ROWS_OF_THREAD = 2


@dataclass(frozen=True)
class ConsumerWarp(Fixed):
    """A warp that multiplies, and then stores what it has.

    Attributes:
        team: which warpgroup. quarter: 0 to 3 in it. lane: 0 to 31.
    """

    team: Any
    quarter: Any
    lane: Any

    @property
    def index(self) -> Any:
        """Among the warps that share a tile."""
        return self.team * 4 + self.quarter


@dataclass(frozen=True)
class Epilogue(Fixed):
    """What happens to a tile: so far its factors alone."""

    def host(self, shape: KernelShape, pointers: Any, sizes: Any, features: Any, rows: Any, groups: Any) -> Any:
        """Tensors and tensor maps for the kernel.

        Args:
            pointers: (out, alpha). sizes: (out row stride, out group stride in elements; alpha strides of features and
                groups).
        """
        out, alpha = pointers
        out_row, out_group, alpha_feature, alpha_group = sizes
        target = PlainStore.host(shape, out, None, features, rows, groups, out_row, out_group, None)  # type: ignore[arg-type]
        return target, cute.make_tensor(
            alpha, cute.make_layout((features, groups), stride=(alpha_feature, alpha_group))
        )

    def device(self, shape: KernelShape, storage: Any, outputs: Any, warp: ConsumerWarp) -> Any:
        """The epilogue inside the kernel, for one warp."""
        target, alphas = outputs
        store = PlainStore.create(shape, storage, target, warp, None)  # type: ignore[arg-type]
        return DeviceEpilogue(shape, alphas, store, warp)


@dataclass(frozen=True)
class DeviceEpilogue(Fixed):
    """For one warp: each tile ``factors``, then ``chunk`` after chunk."""

    shape: KernelShape
    alphas: Any
    store: Any
    warp: ConsumerWarp

    @cute.jit
    def factors(self, feature_tile, group):
        """Of this thread's two rows; beyond the last feature any will do."""
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


__all__ = ["WARP_LANES", "ConsumerWarp", "DeviceEpilogue", "Epilogue"]
