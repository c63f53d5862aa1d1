"""Tiled TMA copies: loads into raw shared memory and stores from it, of every rank, width and swizzle.

A kernel loads boxes at given corners, writes shared memory out as it lies there (so zero fill and swizzle are seen),
changes it with ordinary stores and stores it at other corners, where it is clipped.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.nvgpu import cpasync

from tests.sm100.hardware.case import Case, from_bits, untouched

THREADS = 128
TYPES = {
    "u8": (cutlass.Uint8, torch.uint8),
    "f16": (cutlass.Float16, torch.float16),
    "bf16": (cutlass.BFloat16, torch.bfloat16),
    "s32": (cutlass.Int32, torch.int32),
    "f32": (cutlass.Float32, torch.float32),
}
FLIP = 0x5A5A5A5A
"""What the words of a box are changed by between load and store."""
Corner = tuple[int, ...]


def padded_strides(extents: Corner, itemsize: int) -> Corner:
    """Elements between neighbours: dimension 0 contiguous, gaps of at least 16 bytes after each later dimension."""
    unit = 16 // itemsize
    strides, size = [1], extents[0]
    for extent in extents[1:]:
        strides.append((size // unit + 2) * unit)
        size = extent * strides[-1]
    return tuple(strides)


def swizzle_of(span: int) -> Any:
    """CuTe's swizzle of byte addresses for a span of 0 (none), 32, 64 or 128 bytes."""
    return cute.make_swizzle({0: 0, 32: 1, 64: 2, 128: 3}[span], 4, 3)


class TmaCopies:
    """Loads at ``loads[i]``, a raw dump of shared memory, and a store at ``stores[i]``, one after the other.

    Args:
        dtype: element type.
        extents: of the tensor, dimension 0 contiguous.
        box: likewise.
        span: bytes of the swizzle.
        loads, stores: corners, which may lie outside the tensor.
    """

    def __init__(
        self, dtype: Any, extents: Corner, box: Corner, span: int, loads: list[Corner], stores: list[Corner]
    ) -> None:
        self.dtype, self.extents, self.box, self.span = dtype, extents, box, span
        self.loads, self.stores = loads, stores
        self.nbytes = math.prod(box) * dtype.width // 8

    @cute.jit
    def __call__(self, source: Any, dump: Any, target: Any) -> None:
        whole = cute.make_layout(self.extents, stride=padded_strides(self.extents, self.dtype.width // 8))
        layout = cute.make_composed_layout(swizzle_of(self.span), 0, cute.make_layout(self.box))
        load, load_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), cute.make_tensor(source.iterator, whole), layout, self.box
        )
        store, store_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), cute.make_tensor(target.iterator, whole), layout, self.box
        )
        self.kernel(load, load_tensor, store, store_tensor, dump).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    @cute.jit
    def partition(self, atom: Any, tensor: Any, shared: Any, corner: cutlass.Constexpr) -> Any:
        """The two sides of a copy of the box at ``corner``."""
        rank = len(self.box)
        tile = cute.local_tile(cute.domain_offset(corner, tensor), self.box, (0,) * rank)
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, rank), cute.group_modes(tile, 0, rank)
        )

    @cute.kernel
    def kernel(self, load: Any, load_tensor: Any, store: Any, store_tensor: Any, dump: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        barrier = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        words = cute.arch.alloc_smem(cutlass.Uint32, self.nbytes // 4, alignment=1024)
        raw = cute.make_tensor(words, cute.make_layout(self.nbytes // 4))
        shared = cute.make_tensor(
            cute.recast_ptr(words, swizzle_of(self.span), dtype=self.dtype), cute.make_layout(self.box)
        )
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(len(self.loads)):
            if warp == 0:
                part, tile = self.partition(load, load_tensor, shared, self.loads[step])
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.nbytes)
                cute.copy(load, tile, part, tma_bar_ptr=barrier)
            cute.arch.mbarrier_wait(barrier, step % 2)
            for word in range(thread, self.nbytes // 4, THREADS):
                dump[step, word] = raw[word]
                raw[word] = raw[word] ^ cutlass.Uint32(FLIP)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            if warp == 0:
                part, tile = self.partition(store, store_tensor, shared, self.stores[step])
                cute.copy(store, part, tile)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.sync_threads()


def _corners(extents: Corner, box: Corner, unit: int) -> tuple[list[Corner], list[Corner]]:
    """Where to load and to store: inside, over each edge, wholly outside, and (loads only) before the begin.

    The first coordinate is a multiple of 16 bytes and a store's are not negative: hardware takes no others.
    """
    over = tuple(extent - size // 2 - 1 for extent, size in zip(extents, box, strict=True))
    before = tuple(-(size // 3) for size in box)
    beyond = tuple(extent + unit for extent in extents)
    inside = tuple(min(2, extent - 1) for extent in extents)
    aligned = [(corner[0] // unit * unit, *corner[1:]) for corner in (over, before, beyond)]
    first = (unit, *inside[1:])
    return [tuple(0 for _ in box), *aligned], [aligned[0], tuple(0 for _ in box), first, aligned[2]]


def copy_case(name: str, kind: str, extents: Corner, box: Corner, span: int) -> Case:
    """Loads and stores at all kinds of corners."""
    dtype, stored = TYPES[kind]
    itemsize = dtype.width // 8
    loads, stores = _corners(extents, box, 16 // itemsize)
    # A store may reach the next multiple of 16 bytes.
    size = extents[-1] * padded_strides(extents, itemsize)[-1] + 16 // itemsize
    bits = np.random.default_rng(size).integers(0, 256, size * itemsize, dtype=np.uint8).view(f"u{itemsize}")
    nbytes = math.prod(box) * itemsize
    return Case(
        name,
        TmaCopies(dtype, extents, box, span, loads, stores),
        {"source": from_bits(bits, stored)},
        {"dump": untouched((len(loads), nbytes // 4), torch.int32), "target": untouched((size,), stored)},
        {"dump": [f"load at {corner}" for corner in loads]},
        timed=True,
    )


SHAPES: dict[str, tuple[str, Corner, Corner, int]] = {
    "tma rank 1": ("f32", (83,), (32,), 0),
    "tma rank 2": ("u8", (83, 13), (32, 6), 0),
    "tma rank 2 swizzle 32": ("bf16", (53, 40), (16, 32), 32),
    "tma rank 2 swizzle 64": ("f32", (43, 40), (16, 32), 64),
    "tma rank 2 swizzle 128": ("u8", (341, 40), (128, 24), 128),
    "tma rank 2 swizzle 128 of two atoms": ("bf16", (200, 21), (64, 16), 128),
    "tma rank 3": ("f16", (37, 9, 5), (16, 4, 3), 0),
    "tma rank 3 swizzle 128": ("f32", (77, 9, 5), (32, 4, 3), 128),
    "tma rank 4": ("s32", (13, 5, 4, 3), (8, 4, 3, 2), 0),
    "tma rank 4 swizzle 64": ("bf16", (75, 5, 4, 3), (32, 4, 3, 2), 64),
    "tma rank 5": ("u8", (50, 4, 3, 3, 3), (32, 3, 2, 2, 2), 0),
}
"""Element type, extents, box and swizzle by name."""


def cases() -> list[Case]:
    """Copies of every shape."""
    return [copy_case(name, *shape) for name, shape in SHAPES.items()]
