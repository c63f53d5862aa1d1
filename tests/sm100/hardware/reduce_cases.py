"""TMA reductions: boxes of shared memory added to, or compared with, what a tensor in global memory holds."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.nvgpu import cpasync

from tests.sm100.hardware import values
from tests.sm100.hardware.case import Case, from_bits
from tests.sm100.hardware.tma_cases import TYPES, swizzle_of

THREADS = 64
EXTENTS = (100, 13)
STRIDE = 112


class TmaReduction:
    """Two CTAs, one after the other in time or not, reduce boxes into a ragged tensor; the boxes of a CTA are apart.

    Args:
        dtype: of the elements.
        kind: of the reduction.
        box: dimension 0 has 128 bytes.
        corners: by CTA, where its boxes go.
    """

    def __init__(self, dtype: Any, kind: Any, corners: list[list[tuple[int, int]]]) -> None:
        self.dtype, self.kind, self.corners = dtype, kind, corners
        self.box = (128 * 8 // dtype.width, 8)

    @cute.jit
    def __call__(self, source: Any, target: Any) -> None:
        layout = cute.make_composed_layout(swizzle_of(128), 0, cute.make_layout(self.box))
        whole = cute.make_tensor(target.iterator, cute.make_layout(EXTENTS, stride=(1, STRIDE)))
        atom, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyReduceBulkTensorTileS2GOp(self.kind), whole, layout, self.box
        )
        self.kernel(atom, tensor, source).launch(grid=(len(self.corners), 1, 1), block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, atom: Any, tensor: Any, source: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        words = math.prod(self.box) * self.dtype.width // 32
        raw = cute.arch.alloc_smem(cutlass.Uint32, words, alignment=1024)
        buffer = cute.make_tensor(raw, cute.make_layout(words))
        shared = cute.make_tensor(cute.recast_ptr(raw, swizzle_of(128), dtype=self.dtype), cute.make_layout(self.box))
        for cta in cutlass.range_constexpr(len(self.corners)):
            if block == cta:
                for step in cutlass.range_constexpr(len(self.corners[cta])):
                    for word in range(thread, words, THREADS):
                        buffer[word] = cutlass.Uint32(source[cta, step, word])
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_threads()
                    if warp == 0:
                        tile = cute.local_tile(cute.domain_offset(self.corners[cta][step], tensor), self.box, (0, 0))
                        part, tile = cpasync.tma_partition(
                            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tile, 0, 2)
                        )
                        cute.copy(atom, part, tile)
                        cute.arch.cp_async_bulk_commit_group()
                        cute.arch.cp_async_bulk_wait_group(0)
                    cute.arch.sync_threads()


def _bits(kind: str, shape: tuple[int, ...], whole: bool, seed: int) -> np.ndarray:
    """Operands: whole numbers, whose sums do not depend on order, or any bits with the special values among them."""
    random = np.random.default_rng(seed)
    if kind == "s32":
        return random.integers(0, 2**32, shape, dtype=np.uint32)
    if whole:
        numbers = torch.from_numpy(random.integers(-25, 26, shape).astype(np.float32))
        return numbers.to(TYPES[kind][1]).view(torch.int16 if TYPES[kind][0].width == 16 else torch.int32).numpy()
    if kind == "f32":
        return np.resize(random.permutation(values.floats(0)), shape)
    return random.integers(0, 2**16, shape, dtype=np.uint16)


def reduce_case(name: str, kind: str, operation: str, whole: bool) -> Case:
    """Boxes that overlap (``whole`` or an operation that any order suits), or one box of hard values."""
    dtype, stored = TYPES[kind]
    width = 128 * 8 // dtype.width
    unit = 128 // dtype.width
    edge = (EXTENTS[0] - width // 2) // unit * unit
    apart = [[(edge, 9)], [(unit, 0)]]
    overlapping = [[(0, 0), (edge, 9), (2 * unit, 1)], [(unit, 1), (0, 2)]]
    corners = overlapping if whole or operation != "ADD" else apart
    words = width * 8 * dtype.width // 32
    count = max(len(boxes) for boxes in corners)
    per_word = 32 // dtype.width
    source = np.ascontiguousarray(_bits(kind, (2, count, words * per_word), whole, 15)).view(np.uint32)
    target = _bits(kind, (EXTENTS[1] * STRIDE,), whole, 16)
    return Case(
        name, TmaReduction(dtype, getattr(cute.ReductionKind, operation), corners),
        {"source": from_bits(source, torch.int32)}, {"target": from_bits(target, stored)}, timed=True,
    )  # fmt: skip


def cases() -> list[Case]:
    """Sums of f32 and of half precision, and a maximum."""
    return [
        reduce_case("tma reduce add f32", "f32", "ADD", True),
        reduce_case("tma reduce add f32 of special values", "f32", "ADD", False),
        reduce_case("tma reduce add bf16", "bf16", "ADD", True),
        reduce_case("tma reduce add bf16 of special values", "bf16", "ADD", False),
        reduce_case("tma reduce add f16 of special values", "f16", "ADD", False),
        reduce_case("tma reduce max s32", "s32", "MAX", True),
    ]
