"""Kernels that do nothing but expand one tile of weights, for its registers to be looked at."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint32
from cutlass.cute.runtime import make_ptr

from nvfp4_sgl.cutedsl_kernels.sm90.shape import WeightKind
from nvfp4_sgl.cutedsl_kernels.sm90.stage import EXPAND_HALF, LOAD_HALF


class Expansion:
    """``out[warp, lane, step, register]`` of the tile at ``packed``; one CTA of eight warps."""

    def __init__(self, weights: WeightKind) -> None:
        self.weights = weights

    @staticmethod
    def example() -> list[Any]:
        return [make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=16) for dtype in (cutlass.Uint8, Uint32)]

    @staticmethod
    def arguments(packed: torch.Tensor, out: torch.Tensor) -> list[Any]:
        return [
            make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
            for dtype, tensor in ((cutlass.Uint8, packed), (Uint32, out))
        ]

    @cute.jit
    def __call__(self, packed: cute.Pointer, out: cute.Pointer):
        self.kernel(packed, out).launch(grid=(1, 1, 1), block=(256, 1, 1))

    @cute.kernel
    def kernel(self, packed: cute.Pointer, out: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // 32, thread % 32
        for half in cutlass.range_constexpr(2):
            registers = self._registers(packed, warp, lane, half)
            for i in cutlass.range_constexpr(16):
                place = ((warp * 32 + lane) * 2 + half) * 16 + i
                (out + Int32(place)).store(registers[i])

    def _registers(self, packed: Any, warp: Any, lane: Any, half: int) -> list[Any]:
        return list(EXPAND_HALF[self.weights](LOAD_HALF[self.weights](packed, warp, lane, half)))
