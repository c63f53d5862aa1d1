"""How an epilogue's fp32 values reach global memory: rounded and by TMA, or re-quantised to NVFP4.

The values of a chunk arrive with a feature per thread and a token per register; memory wants a token's features next
to each other. Writing them to shared memory token by token is that transposition: the 32 lanes of a warp write 32
neighbours, so no swizzle is needed to avoid bank conflicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8, Uint32
from cutlass.cute.nvgpu import cpasync

from .fixed import Fixed
from .shape import BLOCK, LANES, SCALE_ATOM_BYTES, TRANSPOSE_PITCH, TRANSPOSE_TOKENS, KernelShape

EPILOGUE_BARRIER = 1
"""Named barrier of the first team."""
TEAM_THREADS = 128
INVERSE_E2M1_MAX = 0x3E2AAAAB
"""Bits of fp32(1/6), the constant of the activation recipe (spec section 9.3)."""


@dataclass(frozen=True)
class Team(Fixed):
    """Four warps of the epilogue, one for each quarter of tensor memory.

    Attributes:
        index: which team. warp: 0 to 3 in it. thread: 0 to 127 in it, the feature of the tile that it owns.
    """

    index: Any
    warp: Any
    thread: Any

    def synchronise(self) -> None:
        """All 128 threads, over a named barrier of the team's own."""
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER + self.index, number_of_threads=TEAM_THREADS)


@dataclass(frozen=True)
class Staging(Fixed):
    """Buffers of shared memory that TMA stores read, one chunk each, used in turn.

    Attributes:
        buffers: shared tensor (width, tokens, buffers); ``width`` elements are a token's 128 features.
        source, destination: the buffers, and the output by feature tile, chunk and group, as the TMA atom sees them.
    """

    shape: KernelShape
    atom: Any
    buffers: Any
    source: Any
    destination: Any
    team: Team

    @classmethod
    def create(cls, shape: KernelShape, storage: Any, dtype: Any, width: int, target: Any, team: Team) -> Staging:
        atom, tensor = target
        layout = cute.make_layout(
            (width, shape.chunk, shape.output_stages), stride=(1, width, shape.output_stage_bytes * 8 // dtype.width)
        )
        buffers = cute.make_tensor(cute.recast_ptr(storage.output.data_ptr(), dtype=dtype), layout)
        tiles = cute.local_tile(tensor, (width, shape.chunk), (None, None, None))
        source, destination = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2), cute.group_modes(tiles, 0, 2)
        )
        return cls(shape, atom, buffers, source, destination, team)

    @staticmethod
    def host(shape: KernelShape, tensor: cute.Tensor, width: int) -> Any:
        """The TMA store of a chunk of ``tensor`` (width-major), and its coordinate tensor."""
        layout = cute.make_layout((width, shape.chunk))
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, layout, (width, shape.chunk))

    @cute.jit
    def acquire(self):
        """Wait until the team's buffer to be written next is no longer read."""
        if self.team.warp == 0:
            cute.arch.cp_async_bulk_wait_group(self.shape.team_buffers - 1, read=True)
        self.team.synchronise()

    @cute.jit
    def store(self, slot: Int32, feature_tile: Int32, chunk_row: Int32, group: Int32, inside: Boolean):
        """Send a buffer that all threads have written, if the tile is ``inside`` the output."""
        cute.arch.fence_view_async_shared()
        self.team.synchronise()
        if self.team.warp == 0:
            if inside:
                cute.copy(self.atom, self.source[None, slot], self.destination[None, feature_tile, chunk_row, group])
            # An empty group, too: acquire() counts one for each buffer.
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def finish(self):
        """Before the CTA ends: its shared memory must stay while stores read it."""
        if self.team.warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class PlainStore(Fixed):
    """Round to bf16 (or keep fp32) and store."""

    shape: KernelShape
    staging: Staging
    team: Team

    @classmethod
    def create(cls, shape: KernelShape, storage: Any, target: Any, team: Team, constant: float | None) -> PlainStore:
        return cls(shape, Staging.create(shape, storage, cls._dtype(shape), LANES, target, team), team)

    @staticmethod
    def _dtype(shape: KernelShape) -> Any:
        return cutlass.BFloat16 if shape.output == "bf16" else Float32

    @staticmethod
    def host(
        shape: KernelShape, out: Any, out_scales: Any, features: Any, rows: Any, groups: Any, row_stride: Any,
        group_stride: Any, atom_row: Any,
    ) -> Any:  # fmt: skip
        tensor = cute.make_tensor(out, cute.make_layout((features, rows, groups), stride=(1, row_stride, group_stride)))
        return Staging.host(shape, tensor, LANES)

    def put(
        self, values: Any, slot: Any, chunk: Any, feature_tile: Any, token_tile: Any, token_group: Any,
        inside: Any,
    ) -> None:  # fmt: skip
        """Store fp32 ``values`` [chunk] of this thread's feature."""
        self.staging.acquire()
        for j in range(self.shape.chunk):
            self.staging.buffers[self.team.thread, j, slot] = values[j].to(self._dtype(self.shape))
        self.staging.store(slot, feature_tile, token_tile * self.shape.chunks + chunk, token_group, inside)

    def finish(self) -> None:
        self.staging.finish()


@dataclass(frozen=True)
class QuantizedStore(Fixed):
    """Quantise to NVFP4 with a constant row scale and store codes (by TMA) and swizzled block scales.

    The recipe of spec section 9.3, step by step: ``s = e4m3((amax * (1/g)) * fp32(1/6))``,
    ``code = e2m1(x * (1 / (fp32(s) * g)))``, divisions correctly rounded, codes 0 where s is 0. The values are finite
    and bounded by the SwiGLU clamp, so its first step (NaN and infinity) has nothing to do.

    Attributes:
        constant: the row scale g.
        scales: uint8 global pointer of the swizzled block scales.
        scale_columns: 4-block columns of atoms in a row of atoms; ``atom_row``: bytes between rows of atoms.
        transpose: fp32 shared pointer, this warp's region.
        scale_bytes: uint8 shared pointer [chunk, 8], the block scales of the team's chunk.
    """

    shape: KernelShape
    staging: Staging
    team: Team
    constant: float
    scales: Any
    scale_columns: Any
    atom_row: Any
    transpose: Any
    scale_bytes: Any

    @classmethod
    def create(
        cls, shape: KernelShape, storage: Any, target: Any, team: Team, constant: float | None
    ) -> QuantizedStore:
        assert constant is not None
        codes, scales, scale_columns, atom_row = target
        region = min(shape.chunk, TRANSPOSE_TOKENS) * TRANSPOSE_PITCH
        return cls(
            shape, Staging.create(shape, storage, Uint8, LANES // 2, codes, team), team, constant,
            scales, scale_columns, atom_row,
            storage.transpose.data_ptr() + (team.index * 4 + team.warp) * region,
            storage.scale_bytes.data_ptr() + team.index * (8 * shape.chunk),
        )  # fmt: skip

    @staticmethod
    def host(
        shape: KernelShape, out: Any, out_scales: Any, features: Any, rows: Any, groups: Any, row_stride: Any,
        group_stride: Any, atom_row: Any,
    ) -> Any:  # fmt: skip
        codes = cute.make_tensor(
            out, cute.make_layout((features // 2, rows, groups), stride=(1, row_stride, group_stride))
        )
        return Staging.host(shape, codes, LANES // 2), out_scales, cute.ceil_div(features, 4 * BLOCK), atom_row

    @cute.jit
    def put(
        self, values: cute.Tensor, slot: Int32, chunk: Int32, feature_tile: Int32, token_tile: Int32,
        token_group: Int32, inside: Boolean,
    ):  # fmt: skip
        """Quantise and store fp32 ``values`` [chunk] of this thread's feature."""
        shape = self.shape
        count = shape.chunk
        lane = self.team.thread % 32
        self.staging.acquire()
        # A warp's 32 features are two blocks of each token: 16 tokens make a block for each of its lanes.
        turned = min(count, TRANSPOSE_TOKENS)
        token, half = lane // 2, lane % 2
        column = self.team.warp * 2 + half
        codes = cute.recast_ptr(self.staging.buffers[None, None, slot].iterator, dtype=Uint32)
        for first in cutlass.range_constexpr(0, count, turned):
            for j in cutlass.range_constexpr(turned):
                (self.transpose + (j * TRANSPOSE_PITCH + lane)).store(values[first + j])
            cute.arch.sync_warp()
            if token < turned:
                block = cute.make_rmem_tensor((BLOCK,), Float32)
                source = (self.transpose + (token * TRANSPOSE_PITCH + half * BLOCK)).align(16)
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(BLOCK)), block)
                scale, low, high = quantize_block(block, self.constant)
                words = codes + ((first + token) * (LANES // 8) + column * 2)
                words.store(low)
                (words + 1).store(high)
                (self.scale_bytes + ((first + token) * 8 + column)).store(scale.to(Uint8))
            cute.arch.sync_warp()
        self.staging.store(slot, feature_tile, token_tile * shape.chunks + chunk, token_group, inside)
        if self.team.thread < 2 * count:
            row, word = chunk * count + self.team.thread // 2, self.team.thread % 2
            column_word = feature_tile * 2 + word
            if column_word < self.scale_columns and inside:
                scales = cute.recast_ptr(self.scale_bytes, dtype=Uint32) + self.team.thread
                offset = column_word * SCALE_ATOM_BYTES + row % 32 * 16 + row // 32 * 4
                place = self.scales + (token_tile * self.atom_row + offset)
                cute.recast_ptr(place.align(4), dtype=Uint32).store(scales.load())

    def finish(self) -> None:
        self.staging.finish()


def quantize_block(block: cute.Tensor, row_scale: float) -> tuple[Any, Any, Any]:
    """``(E4M3 scale, codes of elements 0-7, codes of 8-15)`` of 16 finite fp32 values, as integers of 32 bits."""
    amax = cute.arch.fmax(block[0], -block[0])
    for i in range(1, BLOCK):
        amax = cute.arch.fmax(amax, cute.arch.fmax(block[i], -block[i]))
    g = Float32(row_scale)
    reciprocal = cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[g])
    sixth = cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Uint32(INVERSE_E2M1_MAX)]
    )
    wanted = (amax * reciprocal) * sixth
    scale, value = cute.arch.inline_ptx(
        "{ .reg .b16 s, h; .reg .b32 p, z; mov.b32 z, 0;"
        " cvt.rn.satfinite.e4m3x2.f32 s, z, {$r0}; cvt.rn.f16x2.e4m3x2 p, s; mov.b32 {h, _}, p;"
        " cvt.f32.f16 {$w1}, h; cvt.u32.u16 {$w0}, s; }",
        write_only_types=[Uint32, Float32],
        read_only_args=[wanted],
    )
    inverse = cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value * g])
    # A scale of 0 makes the reciprocal infinite; the codes of such a block are 0.
    inverse = cutlass.select_(scale == 0, Float32(0.0), inverse)
    return scale, encode_e2m1(block, 0, inverse, scale), encode_e2m1(block, 8, inverse, scale)


def encode_e2m1(block: cute.Tensor, first: int, inverse: Any, scale: Any) -> Any:
    """Eight codes, element ``first`` in the low nibble of the low byte."""
    scaled = [block[first + i] * inverse for i in range(8)]
    pairs = " ".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4))
    codes = cute.arch.inline_ptx(
        f"{{ .reg .b8 b0, b1, b2, b3; {pairs} mov.b32 {{$w0}}, {{b0, b1, b2, b3}}; }}",
        write_only_types=[Uint32],
        read_only_args=scaled,
    )
    return cutlass.select_(scale == 0, Uint32(0), codes)
