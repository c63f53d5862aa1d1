"""Re-quantises an epilogue's fp32 values to NVFP4 and stores them to global memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
from cutlass import Boolean, Float32, Int32, Uint8, Uint16, Uint32

from ..common.fixed import Fixed
from ..common.fragment import EpilogueWarp, first_value, token_of
from ..common.shape import BLOCK, TEAM_WARPS
from .shape import SCALE_ATOM_BYTES, SCALE_ATOM_ROWS, TRANSPOSE_PITCH, KernelShape

INVERSE_E2M1_MAX = 0x3E2AAAAB
"""Bits of fp32(1/6), the constant of the activation recipe (specification §9.3)."""


@dataclass(frozen=True)
class QuantizedStore(Fixed):
    """Quantise to NVFP4 with a constant row scale and store codes and swizzled block scales.

    A warp has a block of 16 features of each token of the chunk, and as many threads for each block as it has for each
    token. A block's 8 bytes of codes and its scale go straight to global memory.

    The recipe of specification §9.3, step by step: ``s = e4m3((amax * (1/g)) * fp32(1/6))``,
    ``code = e2m1(x * (1 / (fp32(s) * g)))``, divisions correctly rounded, codes 0 where s is 0. The values are finite
    and bounded by the SwiGLU clamp, so its first step (NaN and infinity) has nothing to do.

    Attributes:
        constant: the row scale g.
        codes: uint8 global tensor [features / 2, rows, groups].
        scales: uint8 global pointer of the swizzled block scales; ``atom_row``: bytes between rows of atoms.
        transpose: fp32 shared pointer, this warp's region.
    """

    shape: KernelShape
    warp: EpilogueWarp
    constant: float
    codes: Any
    scales: Any
    atom_row: Any
    transpose: Any

    @classmethod
    def create(
        cls, shape: KernelShape, storage: Any, target: Any, warp: EpilogueWarp, constant: float
    ) -> QuantizedStore:
        codes, scales, atom_row = target
        region = warp.index * (shape.chunk * TRANSPOSE_PITCH)
        return cls(shape, warp, constant, codes, scales, atom_row, storage.transpose.data_ptr() + region)

    @staticmethod
    def host(
        out: Any, out_scales: Any, features: Any, rows: Any, groups: Any, row_stride: Any, group_stride: Any,
        atom_row: Any,
    ) -> Any:  # fmt: skip
        """The tensor of codes, the block scales, and the bytes between rows of their atoms."""
        layout = cute.make_layout((features // 2, rows, groups), stride=(1, row_stride, group_stride))
        return cute.make_tensor(out, layout), out_scales, atom_row

    @cute.jit
    def put(
        self, values: cute.Tensor, slot: Int32, chunk: Int32, feature_tile: Int32, token_tile: Int32,
        token_group: Int32, inside: Boolean,
    ):  # fmt: skip
        """Quantise and store this thread's fp32 values of a chunk."""
        shape, lane = self.shape, self.warp.lane
        threads, own = 32 // shape.chunk, shape.chunk // 2
        for group in cutlass.range_constexpr(shape.chunk // 8):
            for i in cutlass.range_constexpr(2):
                for second in cutlass.range_constexpr(2):
                    word = (token_of(lane, group) + second) * TRANSPOSE_PITCH + lane // 4 + 8 * i
                    (self.transpose + word).store(values[first_value(shape.chunk, i, group) + second])
        cute.arch.sync_warp()
        token, part = lane // threads, lane % threads
        block = cute.make_rmem_tensor((own,), Float32)
        source = (self.transpose + (token * TRANSPOSE_PITCH + part * own)).align(16)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(own)), block)
        scale, codes = quantize_block(block, threads, self.constant)
        # The next chunk may overwrite what all lanes have read.
        cute.arch.sync_warp()
        within = chunk * shape.chunk + token
        row = token_tile * shape.token_tile + within
        column = feature_tile * TEAM_WARPS + self.warp.quarter
        width, rows = self.codes.shape[0], self.codes.shape[1]
        if inside:
            if (row < rows) & (column * (BLOCK // 2) < width):
                offset = cute.crd2idx((column * (BLOCK // 2) + part * (own // 2), row, token_group), self.codes.layout)
                place = (self.codes.iterator + offset).align(own // 2)
                target = cute.make_tensor(cute.recast_ptr(place, dtype=codes.element_type), codes.layout)
                cute.autovec_copy(codes, target)
            atom_rows = min(shape.token_tile, SCALE_ATOM_ROWS)
            atom, in_atom = row // atom_rows, row % atom_rows
            # An atom is whole, beyond the last row and feature, too. A tile may have atoms that are nobody's.
            if (part == 0) & (atom * atom_rows < rows) & (column // 4 * (4 * BLOCK // 2) < width):
                offset = column // 4 * SCALE_ATOM_BYTES + in_atom % 32 * 16 + in_atom // 32 * 4 + column % 4
                (self.scales + (atom * self.atom_row + offset)).store(scale.to(Uint8))

    def finish(self) -> None:
        """Nothing is under way that reads shared memory."""


def quantize_block(values: cute.Tensor, threads: int, row_scale: float) -> tuple[Any, cute.Tensor]:
    """Quantise a block of 16 finite fp32 values that ``threads`` neighbouring lanes share equally.

    Returns the E4M3 scale, the same in all of them, and this lane's codes: integers of 16 or 32 bits, the first in the
    low nibble.
    """
    count = cute.size(values)
    amax = absolute(values[0])
    for i in range(1, count):
        amax = cute.arch.fmax(amax, absolute(values[i]))
    step = 1
    while step < threads:
        amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, step))
        step *= 2
    g = Float32(row_scale)
    reciprocal = Float32(float(np.float32(1) / np.float32(row_scale)))
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
    # A scale of 0 makes the reciprocal infinite and the codes anything: they are to be 0.
    scaled = [values[i] * inverse for i in range(count)]
    of_word = min(count, 8)
    word = Uint16 if of_word == 4 else Uint32
    codes = cute.make_rmem_tensor((count // of_word,), word)
    for i in range(count // of_word):
        encoded = encode_e2m1(scaled[i * of_word : (i + 1) * of_word], word)
        codes[i] = cutlass.select_(scale == 0, word(0), encoded)
    return scale, codes


def absolute(value: Any) -> Any:
    """Absolute value by PTX's own instruction, which SASS has as a modifier of the operand."""
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def encode_e2m1(scaled: list[Any], word: Any) -> Any:
    """The codes that make an integer of type ``word``, the first in the low nibble of the low byte."""
    codes = [f"b{i}" for i in range(len(scaled) // 2)]
    convert = " ".join(
        f"cvt.rn.satfinite.e2m1x2.f32 {code}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i, code in enumerate(codes)
    )
    return cute.arch.inline_ptx(
        f"{{ .reg .b8 {', '.join(codes)}; {convert} mov.b{word.width} {{$w0}}, {{{', '.join(codes)}}}; }}",
        write_only_types=[word],
        read_only_args=scaled,
    )
