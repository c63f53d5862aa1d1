"""Stores an epilogue's fp32 values to global memory by TMA, rounded to bf16 or as they are.

A thread has two tokens of several features (``fragment.py``); memory wants a token's features next to each other. That
transposition goes through shared memory, for each warp on its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from .fixed import Fixed
from .fragment import EpilogueWarp, first_value, token_of
from .shape import TEAM_WARPS, GemmShape


@dataclass(frozen=True)
class PlainStore(Fixed):
    """Round to bf16 (or keep fp32) and store by TMA, through the warp's own buffers, round robin.

    Several tensors of equal strides may get the same values, each by a copy of its own from the same buffer.

    A buffer is [tokens of a chunk, features of the warp], swizzled by the bytes of its rows, so that the writes of
    eight tokens touch all banks.

    Attributes:
        buffers: address of the warp's first buffer in shared memory.
        targets: for each tensor the TMA atom; the buffers of all warps, and the tensor by warp, chunk and group, as the
            atom sees them.
    """

    shape: GemmShape
    buffers: Any
    targets: tuple[tuple[Any, Any, Any], ...]
    warp: EpilogueWarp

    @classmethod
    def create(cls, shape: GemmShape, storage: Any, targets: Any, warp: EpilogueWarp) -> PlainStore:
        """The store of one warp to all of ``targets``, each as :meth:`host` returned it."""
        box = (shape.warp_outputs, shape.store_tokens)
        count = TEAM_WARPS * shape.teams * shape.warp_buffers
        layout = cute.make_layout((*box, count), stride=(1, shape.warp_outputs, shape.warp_outputs * box[1]))
        buffers = storage.output.get_tensor(layout, swizzle=cls._swizzle(shape), dtype=cls._dtype(shape))
        copies = []
        for atom, tensor in targets:
            tiles = cute.local_tile(tensor, box, (None, None, None))
            source, destination = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2), cute.group_modes(tiles, 0, 2)
            )
            copies.append((atom, source, destination))
        start = storage.output.data_ptr().toint() + cls._first_buffer(shape, warp) * cls._buffer_bytes(shape)
        return cls(shape, start, tuple(copies), warp)

    @staticmethod
    def _first_buffer(shape: GemmShape, warp: EpilogueWarp) -> Any:
        return warp.index * shape.warp_buffers

    @staticmethod
    def _buffer_bytes(shape: GemmShape) -> int:
        return shape.store_tokens * shape.warp_row_bytes

    @staticmethod
    def _dtype(shape: GemmShape) -> Any:
        return cutlass.BFloat16 if shape.output == "bf16" else Float32

    @staticmethod
    def _swizzle(shape: GemmShape) -> Any:
        """Swizzle of the units of 16 bytes within a row by the row's number."""
        return cute.make_swizzle((shape.warp_row_bytes // 16).bit_length() - 1, 4, 3)

    @classmethod
    def host(
        cls, shape: GemmShape, out: Any, features: Any, rows: Any, groups: Any, row_stride: Any, group_stride: Any
    ) -> Any:
        """The TMA store of a warp's buffer to one tensor, and the coordinate tensor of that."""
        tensor = cute.make_tensor(out, cute.make_layout((features, rows, groups), stride=(1, row_stride, group_stride)))
        box = (shape.warp_outputs, shape.store_tokens)
        layout = cute.make_composed_layout(cls._swizzle(shape), 0, cute.make_layout(box))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, box)

    @cute.jit
    def put(
        self, values: cute.Tensor, slot: Int32, chunk: Int32, feature_tile: Int32, token_tile: Int32,
        token_group: Int32, inside: Boolean,
    ):  # fmt: skip
        """Store this thread's fp32 values of a chunk."""
        shape, warp = self.shape, self.warp
        parts = shape.chunk // shape.store_tokens
        for part in cutlass.range_constexpr(parts):
            if cutlass.const_expr(parts > 1):
                slot = Int32(part % shape.warp_buffers)
            # Wait until the buffer has been read.
            cute.arch.cp_async_bulk_wait_group(shape.warp_buffers - 1, read=True)
            cute.arch.sync_warp()
            groups = range(part * shape.store_tokens // 8, (part + 1) * shape.store_tokens // 8)
            buffer = self.buffers + slot * self._buffer_bytes(shape)
            if cutlass.const_expr(shape.output == "bf16"):
                self._write_bf16(values, groups, buffer)
            else:
                self._write_fp32(values, groups, buffer)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            if inside:
                column = feature_tile * TEAM_WARPS + warp.quarter
                row = (token_tile * shape.chunks + chunk) * parts + part
                number = self._first_buffer(shape, warp) + slot
                for i in cutlass.range_constexpr(len(self.targets)):
                    atom, source, destination = self.targets[i]
                    cute.copy(atom, source[None, number], destination[None, column, row, token_group])
            # Commit an empty group, too: the wait counts one for each buffer.
            cute.arch.cp_async_bulk_commit_group()

    def skip(self) -> None:
        """Skip a chunk but take the next buffer, so that the next ``put`` waits for the right one."""
        for _ in range(self.shape.chunk // self.shape.store_tokens):
            cute.arch.cp_async_bulk_commit_group()

    def _swizzled(self, offset: Any) -> Any:
        """Swizzled place of a byte of a buffer."""
        return offset ^ ((offset >> 3) & (self.shape.warp_row_bytes - 16))

    def _write_bf16(self, values: cute.Tensor, groups: range, buffer: Any) -> None:
        """A matrix of 8 features by 8 tokens for each register, 8 tokens of all features at a time."""
        shape, lane = self.shape, self.warp.lane
        matrices = shape.warp_outputs // 8
        # Lane 8 i + t gives the address of token t of matrix i.
        place = buffer + self._swizzled(lane % 8 * shape.warp_row_bytes + lane // 8 % matrices * 16)
        for turn, group in enumerate(groups):
            firsts = [first_value(shape.chunk, i, group) for i in range(matrices)]
            registers = ", ".join(f"{{$r{1 + i}}}" for i in range(matrices))
            cute.arch.inline_ptx(
                f"stmatrix.sync.aligned.m8n8.x{matrices}.trans.shared.b16 [{{$r0}}], {{ {registers} }};",
                read_only_args=[
                    Uint32(place + turn * 8 * shape.warp_row_bytes),
                    *(pack_bf16(values[first], values[first + 1]) for first in firsts),
                ],
            )

    def _write_fp32(self, values: cute.Tensor, groups: range, buffer: Any) -> None:
        """32 lanes write 8 features of 4 tokens, which are all banks once: no wider access would take less time."""
        shape, lane = self.shape, self.warp.lane
        for i in range(shape.warp_outputs // 8):
            for second in range(2):
                token, feature = token_of(lane, 0) + second, lane // 4 + 8 * i
                place = Uint32(buffer + self._swizzled(token * shape.warp_row_bytes + feature * 4))
                for turn, group in enumerate(groups):
                    # 8 tokens further the swizzle is the same.
                    cute.arch.inline_ptx(
                        f"st.shared.f32 [{{$r0}} + {turn * 8 * shape.warp_row_bytes}], {{$r1}};",
                        read_only_args=[place, values[first_value(shape.chunk, i, group) + second]],
                    )

    @cute.jit
    def finish(self):
        """Wait for all stores: shared memory must stay while they read it."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def pack_bf16(low: Any, high: Any) -> Any:
    """Two fp32 values, each rounded to bf16, as an integer of 32 bits. Any NaN becomes 0x7FFF (PTX ISA, ``cvt``)."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )
