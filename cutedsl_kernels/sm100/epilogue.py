"""From accumulators to outputs: factors, SwiGLU, rounding, re-quantisation, and how the result reaches memory.

A thread of the epilogue owns one feature (its lane of tensor memory) and sees a chunk of tokens at a time. An epilogue
is a chain: *factors* turn accumulators into dequantised fp32, *gating* (if any) joins two of them, *store* rounds and
writes. Order of operations, all single fp32 roundings: ``(acc * row_scale) * alpha``, then ``* row_weight``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .fixed import Fixed
from .shape import LANES, KernelShape
from .store import TEAM_THREADS, PlainStore, QuantizedStore, Team

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Epilogue(Fixed):
    """What happens to a tile.

    Attributes:
        limit: the SwiGLU clamp of a gated kernel, else None.
        weighted: whether each row has a further factor (the routing weight).
        row_scale_constant: for NVFP4 output, the constant row scale that the output is quantised with.
    """

    limit: float | None = None
    weighted: bool = False
    row_scale_constant: float | None = None

    def host(self, shape: KernelShape, pointers: Any, sizes: Any, features: Any, rows: Any, groups: Any) -> Any:
        """Tensors and tensor maps for the kernel.

        Args:
            pointers: (out, out_scales or None, row_scale, row_weight or None, alpha).
            sizes: (out row stride, out group stride in elements; row_scale strides of rows and groups;
                alpha strides of features and matrices; row stride of out_scales' atoms in bytes).
        """
        out, out_scales, row_scale, row_weight, alpha = pointers
        out_row, out_group, scale_row, scale_group, alpha_feature, alpha_matrix, atom_row = sizes
        matrices = groups * shape.halves
        store = PlainStore if shape.output != "nvfp4" else QuantizedStore
        target = store.host(shape, out, out_scales, features, rows, groups, out_row, out_group, atom_row)
        scales = cute.make_tensor(row_scale, cute.make_layout((rows, groups), stride=(scale_row, scale_group)))
        weights = None
        if cutlass.const_expr(self.weighted):
            weights = cute.make_tensor(row_weight, cute.make_layout(rows))
        alphas = cute.make_tensor(alpha, cute.make_layout((features, matrices), stride=(alpha_feature, alpha_matrix)))
        return target, scales, weights, alphas

    def device(self, shape: KernelShape, storage: Any, outputs: Any, team: Team) -> Any:
        """The epilogue inside the kernel, for one team."""
        target, scales, weights, alphas = outputs
        make = PlainStore if shape.output != "nvfp4" else QuantizedStore
        store = make.create(shape, storage, target, team, self.row_scale_constant)
        start = storage.row_factors.data_ptr() + team.index * (2 * shape.token_tile)
        factors = cute.make_tensor(start, cute.make_layout((shape.token_tile, 2)))
        return DeviceEpilogue(shape, self, scales, weights, alphas, factors, store, team)


@dataclass(frozen=True)
class DeviceEpilogue(Fixed):
    """The chain for one team; ``begin`` each tile, then ``chunk`` after chunk."""

    shape: KernelShape
    epilogue: Epilogue
    scales: Any
    weights: Any
    alphas: Any
    row_factors: Any
    """fp32 shared tensor [token_tile, 2]: row scale, row weight; the team's own."""
    store: Any
    team: Team

    @cute.jit
    def begin(self, feature_tile: Int32, token_tile: Int32, weight_group: Int32, token_group: Int32):
        """Stage the tile's row factors in shared memory; the returned alphas are this thread's, one per half."""
        shape = self.shape
        # All global loads first, so that their latencies overlap. Beyond the last row any factor will do.
        feature = cutlass.min(feature_tile * LANES + self.team.thread, self.alphas.shape[0] - 1)
        alphas = [self.alphas[feature, weight_group * shape.halves + half] for half in range(shape.halves)]
        turns = range((shape.token_tile + TEAM_THREADS - 1) // TEAM_THREADS)
        tokens = [self.team.thread + turn * TEAM_THREADS for turn in turns]
        rows = [cutlass.min(token_tile * shape.token_tile + token, self.scales.shape[0] - 1) for token in tokens]
        factors = [[self.scales[row, token_group] for row in rows]]
        if cutlass.const_expr(self.weights is not None):
            factors.append([self.weights[row] for row in rows])
        # Every store ends with a barrier after the factors were read, so the last tile's may be overwritten.
        for turn in cutlass.range_constexpr(len(tokens)):
            if tokens[turn] < shape.token_tile:
                for which in cutlass.range_constexpr(len(factors)):
                    self.row_factors[tokens[turn], which] = factors[which][turn]
        self.team.synchronise()
        return tuple(alphas)

    def chunk(
        self, values: Any, alphas: Any, slot: Any, chunk: Any, feature_tile: Any, token_tile: Any, token_group: Any,
        inside: Any,
    ) -> None:  # fmt: skip
        """Finish one chunk: ``values`` holds one register tensor per half."""
        shape = self.shape
        for half in range(shape.halves):
            multiply(values[half], self._row_factors(chunk, 0))
            multiply(values[half], [alphas[half]] * shape.chunk)
        if self.epilogue.limit is not None:
            for j in range(shape.chunk):
                values[0][j] = clamped_swiglu(values[0][j], values[1][j], self.epilogue.limit)
        if self.weights is not None:
            multiply(values[0], self._row_factors(chunk, 1))
        self.store.put(values[0], slot, chunk, feature_tile, token_tile, token_group, inside)

    def finish(self) -> None:
        """After the last tile."""
        self.store.finish()

    def _row_factors(self, chunk: Any, which: int) -> Any:
        count = self.shape.chunk
        registers = cute.make_rmem_tensor((count,), Float32)
        pointer = self.row_factors.iterator + which * self.shape.token_tile + chunk * count
        cute.autovec_copy(cute.make_tensor(pointer.align(16), cute.make_layout(count)), registers)
        return registers


def multiply(values: Any, factors: Any) -> None:
    """``values[j] *= factors[j]`` in fp32, two at a time as SM100 can."""
    for j in range(0, cute.size(values), 2):
        values[j], values[j + 1] = cute.arch.mul_packed_f32x2((values[j], values[j + 1]), (factors[j], factors[j + 1]))


def clamped_swiglu(gate: Any, up: Any, limit: float) -> Any:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``; +0 where that would be NaN (spec section 6.2).

    The sigmoid takes the hardware's ex2.approx and rcp.approx: relative error below 2^-21.
    """
    gate = cute.arch.fmin(gate, limit)
    up = cute.arch.fmax(cute.arch.fmin(up, limit), -limit)
    sigmoid = cute.arch.rcp_approx(Float32(1.0) + cute.arch.exp2(gate * Float32(-LOG2_E)))
    hidden = (gate * sigmoid) * up
    return cutlass.select_(hidden == hidden, hidden, Float32(0.0))
