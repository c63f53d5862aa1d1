"""From accumulators to outputs: factors, SwiGLU, rounding, re-quantisation, and how the result reaches memory.

A warp of the epilogue owns 32 weight rows (its lanes of tensor memory) and takes a chunk of tokens at a time;
``..common.fragment`` says which thread has what. An epilogue is a chain: *factors* turn accumulators into dequantised
fp32, *gating* (if any) joins gates and ups, *store* rounds and writes. Order of operations, all single fp32 roundings:
``(acc * row_scale) * alpha``, then ``* row_weight``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.fixed import Fixed
from ..common.fragment import EpilogueWarp, values_of
from ..common.shape import TEAM_THREADS, WARP_LANES
from ..common.store import PlainStore
from ..common.swiglu import clamped_swiglu
from .quantized_store import QuantizedStore
from .shape import LANES, KernelShape


@dataclass(frozen=True)
class Epilogue(Fixed):
    """The epilogue of a tile.

    Attributes:
        limit: the SwiGLU clamp of a gated kernel, else None.
        weighted: whether each row has a further factor (the routing weight).
        row_scale_constant: for NVFP4 output, the constant row scale that the output is quantised with.
    """

    limit: float | None = None
    weighted: bool = False
    row_scale_constant: float | None = None

    def host(self, shape: KernelShape, arguments: Any) -> Any:
        """Tensors and tensor maps for the kernel, of the launch's traced ``Arguments``."""
        a = arguments
        outputs = a.features // shape.rows_per_feature
        if shape.output == "nvfp4":
            target = QuantizedStore.host(
                a.out, a.out_scales, outputs, a.rows, a.groups, a.out_row, a.out_group, a.out_scale_row
            )
        else:
            target = (PlainStore.host(shape, a.out, outputs, a.rows, a.groups, a.out_row, a.out_group),)
        scale_layout = cute.make_layout((a.rows, a.groups), stride=(a.row_scale_row, a.row_scale_group))
        scales = cute.make_tensor(a.row_scale, scale_layout)
        weights = cute.make_tensor(a.row_weight, cute.make_layout(a.rows)) if self.weighted else None
        of_group = 2 if shape.gated else a.features
        alpha_layout = cute.make_layout((of_group, a.groups), stride=(a.alpha_feature, a.alpha_group))
        return target, scales, weights, cute.make_tensor(a.alpha, alpha_layout)

    def device(self, shape: KernelShape, storage: Any, outputs: Any, warp: EpilogueWarp) -> Any:
        """The epilogue inside the kernel, for one warp."""
        target, scales, weights, alphas = outputs
        store: PlainStore | QuantizedStore
        if shape.output == "nvfp4":
            assert self.row_scale_constant is not None
            store = QuantizedStore.create(shape, storage, target, warp, self.row_scale_constant)
        else:
            store = PlainStore.create(shape, storage, target, warp)
        start = storage.row_factors.data_ptr() + warp.team * (2 * shape.token_tile)
        factors = cute.make_tensor(start, cute.make_layout(2 * shape.token_tile))
        return DeviceEpilogue(shape, self, scales, weights, alphas, factors, store, warp)


@dataclass(frozen=True)
class DeviceEpilogue(Fixed):
    """The chain for one warp; each tile ``fetch``, ``begin``, then ``chunk`` after chunk."""

    shape: KernelShape
    epilogue: Epilogue
    scales: Any
    weights: Any
    alphas: Any
    row_factors: Any
    """fp32 shared tensor [2 * token_tile]: row scales, row weights, in the order of ``_place``; the team's own."""
    store: Any
    warp: EpilogueWarp

    @cute.jit
    def fetch(self, feature_tile: Int32, token_tile: Int32, weight_group: Int32, token_group: Int32):
        """Begin to load a tile's factors, to be given to ``begin``: a tile before, since their latency is long."""
        shape, warp = self.shape, self.warp
        if cutlass.const_expr(shape.gated):
            alphas = [self.alphas[half, weight_group] for half in range(2)]
        else:
            first = feature_tile * LANES + warp.quarter * WARP_LANES + warp.lane // 4
            features = [cutlass.min(first + 8 * i, self.alphas.shape[0] - 1) for i in range(4)]
            alphas = [self.alphas[feature, weight_group] for feature in features]
        # Beyond the last row any factor will do.
        rows = [token_tile * shape.token_tile + token for token in self._own_tokens()]
        rows = [cutlass.min(row, self.scales.shape[0] - 1) for row in rows]
        factors = [self.scales[row, token_group] for row in rows]
        if cutlass.const_expr(self.weights is not None):
            factors += [self.weights[row] for row in rows]
        return tuple(alphas), tuple(factors)

    @cute.jit
    def begin(self, fetched: Any):
        """Stage the tile's row factors in shared memory; the returned alphas are those of this thread's 4 rows."""
        shape, tokens = self.shape, self._own_tokens()
        alphas, factors = fetched
        # Other warps of the team may still read the last tile's.
        self.warp.synchronise_team()
        for i in cutlass.range_constexpr(len(tokens)):
            if tokens[i] < shape.token_tile:
                for which in cutlass.range_constexpr(len(factors) // len(tokens)):
                    place = which * shape.token_tile + self._place(tokens[i])
                    self.row_factors[place] = factors[which * len(tokens) + i]
        self.warp.synchronise_team()
        if cutlass.const_expr(shape.gated):
            return alphas[0], alphas[0], alphas[1], alphas[1]
        return alphas

    def _own_tokens(self) -> list[Any]:
        """Tokens of a tile whose row factors this thread brings to the others."""
        thread = self.warp.quarter * WARP_LANES + self.warp.lane
        return [thread + first for first in range(0, self.shape.token_tile, TEAM_THREADS)]

    def _place(self, token: Any) -> Any:
        """Place of the factors of a token of the tile; those that a thread needs of a chunk are neighbours."""
        chunk, groups = self.shape.chunk, self.shape.chunk // 8
        within = token % chunk
        return token // chunk * chunk + within % 8 // 2 * (2 * groups) + within // 8 * 2 + within % 2

    def factors(self, chunk: Any) -> list[cute.Tensor]:
        """Row scales, and row weights if any, of this thread's tokens of a chunk: to be read before they are needed."""
        shape, found = self.shape, []
        count = shape.chunk // 4
        for which in range(1 if self.weights is None else 2):
            registers = cute.make_rmem_tensor((count,), Float32)
            place = which * shape.token_tile + chunk * shape.chunk + self.warp.lane % 4 * count
            source = (self.row_factors.iterator + place).align(min(4 * count, 16))
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), registers)
            found.append(registers)
        return found

    def chunk(
        self, values: Any, factors: Any, alphas: Any, slot: Any, chunk: Any, feature_tile: Any, token_tile: Any,
        token_group: Any, inside: Any,
    ) -> None:  # fmt: skip
        """Finish one chunk: ``values`` are this thread's of the fragment."""
        shape = self.shape
        self._multiply_rows(values, 4, factors[0])
        for i in range(4):
            for first in values_of(shape.chunk, i):
                multiply_pair(values, first, alphas[i], alphas[i])
        if self.epilogue.limit is not None:
            half = cute.size(values) // 2
            for j in range(half):
                values[j] = clamped_swiglu(values[j], values[half + j], self.epilogue.limit)
        if self.weights is not None:
            self._multiply_rows(values, 4 // shape.rows_per_feature, factors[1])
        self.store.put(values, slot, chunk, feature_tile, token_tile, token_group, inside)

    def finish(self) -> None:
        """After the last tile."""
        self.store.finish()

    def _multiply_rows(self, values: Any, count: int, factors: Any) -> None:
        """Multiply the values of the thread's first ``count`` rows by a factor of each token."""
        for i in range(count):
            for group, first in enumerate(values_of(self.shape.chunk, i)):
                multiply_pair(values, first, factors[2 * group], factors[2 * group + 1])


def multiply_pair(values: Any, first: int, low: Any, high: Any) -> None:
    """``values[first] *= low; values[first + 1] *= high`` in fp32, as one instruction of SM100."""
    values[first], values[first + 1] = cute.arch.mul_packed_f32x2((values[first], values[first + 1]), (low, high))
