"""Chunks of an accumulator from tensor memory to registers, as ``..common.fragment`` says who holds what."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from ..common.fragment import EpilogueWarp
from ..common.shape import WARP_LANES
from .shape import LANES

LANE_STRIDE = 1 << 16
"""Difference between the addresses of neighbouring lanes of tensor memory."""


def make_fragment(tokens: int) -> cute.Tensor:
    """This thread's registers."""
    return cute.make_rmem_tensor((tokens,), Float32)


def read_fragment(tensor_memory: Any, column: Any, warp: EpilogueWarp, fragment: cute.Tensor) -> None:
    """Begin to load the chunk that begins at a column; ``cute.arch.fence_view_async_tmem_load`` waits for it."""
    tokens = cute.size(fragment)
    atom = cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition(tokens // 8)), Float32)
    pointer = tensor_memory + cute.assume(Int32(column), divby=8)
    source = cute.make_tensor(pointer, cute.make_layout((LANES, tokens), stride=(LANE_STRIDE, 1)))
    copy = tcgen05.make_tmem_copy(atom, source)
    part = copy.get_slice(warp.quarter * WARP_LANES + warp.lane)
    target = part.partition_D(cute.make_identity_tensor((LANES, tokens)))
    cute.copy(copy, part.partition_S(source), cute.make_tensor(fragment.iterator, cute.make_layout(target.shape)))
