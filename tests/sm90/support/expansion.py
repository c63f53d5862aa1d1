"""A kernel that does nothing but expand one tile of weights, for its registers to be looked at."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Uint32
from cutlass.cute.runtime import make_ptr

from nvfp4_sgl.cutedsl_kernels.sm90.expand import expand_pair
from nvfp4_sgl.cutedsl_kernels.sm90.weights import load_half

PAIRS = 4
"""Pairs of steps of 16 in a tile."""


class Expansion:
    """``out[warp, lane, step, register]`` of the tile at ``packed``; one CTA of eight warps."""

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
            codes, scales = load_half(packed, warp, lane, half)
            for pair in cutlass.range_constexpr(PAIRS // 2):
                registers = expand_pair(codes[2 * pair], codes[2 * pair + 1], scales[pair])
                for i in cutlass.range_constexpr(8):
                    place = ((warp * 32 + lane) * 8 + half * 4 + pair * 2 + i // 4) * 4 + i % 4
                    (out + Int32(place)).store(registers[i])
