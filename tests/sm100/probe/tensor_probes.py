"""tcgen05: tensor memory, copies of block scales into it, one block-scaled MMA of a CTA and of a pair."""

from __future__ import annotations

import re
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from tests.sm100.hardware.case import Case, from_bits, untouched
from tests.sm100.probe.probe import Probe
from tests.sm100.support.tensor_snippets import THREADS, core_matrices, tensor_body
from tests.support.numpy_nvfp4 import dequantize

LANES = 128
MMA_K = 64
SCALES = 4
"""Block scales of a row and ``MMA_K`` elements."""
PRIVATE_REGISTERS = "".join(
    f".reg .{kind} private_{name}<64>; " for kind, name in (("pred", "p"), ("b16", "h"), ("b32", "r"), ("b64", "q"))
)


def with_private_registers(text: str) -> str:
    """``text`` with registers that the compiler around it cannot mean."""
    return re.sub(r"%([phrq])(\d+)", r"private_\1\2", text)


class TensorCode:
    """The kernel of ``tensor_snippets.run_tensor_code``, through CuTeDSL: a cluster of one CTA or two.

    Args:
        code: run by one thread; %q10 is the descriptor bits of the begin of shared memory, to be added to descriptors.
        ctas: of the cluster. size: bytes of shared memory of each. columns: of tensor memory.
    """

    def __init__(self, code: str, ctas: int, size: int, columns: int) -> None:
        self.ctas, self.size = ctas, size
        located = f"shr.u32 %r29, %r3, 4; and.b32 %r29, %r29, 0x3fff; cvt.u64.u32 %q10, %r29;\n{code}"
        body = tensor_body(located, ctas, size, columns)
        arguments = (
            "mov.b32 %r1, {$r0}; mov.b32 %r21, {$r1}; cvt.u32.u64 %r3, {$r2};"
            " mov.b64 %q0, {$r3}; mov.b64 %q2, {$r4}; mov.b64 %q4, {$r5};"
        )
        self.text = with_private_registers(f"{{ {PRIVATE_REGISTERS}{arguments}\n{body} }}")

    @cute.jit
    def __call__(self, shared: Any, before: Any, cells: Any) -> None:
        self.kernel(shared, before, cells).launch(
            grid=(self.ctas, 1, 1), block=(THREADS, 1, 1), cluster=(self.ctas, 1, 1)
        )

    @cute.kernel
    def kernel(self, shared: Any, before: Any, cells: Any) -> None:
        room = cute.arch.alloc_smem(cutlass.Uint32, self.size // 4 + 4, alignment=1024)
        thread, _, _ = cute.arch.thread_idx()
        rank = cute.arch.block_idx_in_cluster()
        addresses = [tensor.iterator.toint() for tensor in (shared, before, cells)]
        inline_ptx(self.text, read_only_args=[rank, thread, cutlass.Int64(room.toint()), *addresses])


def tensor_probe(
    name: str, shows: str, code: str, shared: np.ndarray, before: np.ndarray, expected: np.ndarray
) -> Probe:
    """``code`` on shared memory u8 [CTAs, bytes] and tensor memory u32 [CTAs, 128, columns]."""
    ctas, size = shared.shape
    columns = before.shape[2]
    case = Case(
        name,
        TensorCode(code, ctas, size, columns),
        {"shared": torch.from_numpy(shared), "before": from_bits(before, torch.int32)},
        {"cells": untouched((ctas, LANES, columns), torch.int32)},
        timed=True,
    )
    return Probe(case, shows, {"cells": expected})


def random_cells(ctas: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (ctas, LANES, columns), dtype=np.uint32)


def descriptor(offset: int, leading: int, stride: int) -> int:
    """Descriptor of an operand without swizzle, but for where shared memory begins."""
    return offset >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46


def tensor_memory() -> Probe:
    cells = random_cells(1, 32, 1)
    nothing = np.zeros((1, 16 * THREADS), np.uint8)
    return tensor_probe(
        "tensor memory", "tcgen05.alloc, st, ld, wait, commit, dealloc", "", nothing, cells, cells.copy()
    )


def scale_copy() -> Probe:
    """32 rows of 16 bytes to each quarter of the lanes, as block scales are copied (UTCCP)."""
    rows = np.random.default_rng(2).integers(0, 256, (32, 16), dtype=np.uint8)
    shared = np.zeros((1, 16 * THREADS), np.uint8)
    shared[0, : rows.size] = core_matrices(rows)
    before = random_cells(1, 16, 3)
    code = f"""add.s32 %r24, %r20, 4; mov.u64 %q5, {descriptor(0, 16 * 32, 128)}; add.s64 %q5, %q5, %q10;
    tcgen05.cp.cta_group::1.32x128b.warpx4 [%r24], %q5;"""
    expected = before.copy()
    expected[0, :, 4:8] = np.tile(rows.view(np.uint32), (4, 1))
    return tensor_probe("copy of block scales", "tcgen05.cp.32x128b.warpx4", code, shared, before, expected)


def scale_rows(scales: np.ndarray) -> np.ndarray:
    """Block scales u8 [rows, 4] as 32 rows of 16 bytes, which ``32x128b.warpx4`` copies: 4 bytes of rows r + 32 i."""
    padded = np.zeros((LANES, SCALES), np.uint8)
    padded[: len(scales)] = scales
    return np.ascontiguousarray(padded.reshape(4, 32, SCALES).transpose(1, 0, 2)).reshape(32, 16)


def random_scales(rows: int, random: np.random.Generator) -> np.ndarray:
    """E4M3 bytes [rows, SCALES]; one exponent a row, so that a sum of ``MMA_K`` products has 22 bits and is exact."""
    exponents = random.integers(5, 10, (rows, 1), dtype=np.uint8)
    return exponents << 3 | random.integers(0, 8, (rows, SCALES), dtype=np.uint8)


def block_scaled(ctas: int, n: int) -> Probe:
    """128 rows of A a CTA times ``n`` rows of B (of which each CTA of a pair holds half), K = 64, one instruction.

    Codes and block scales come from shared memory; scales by ``tcgen05.cp``, each CTA's own rows of A and all of B.
    """
    random = np.random.default_rng(ctas)
    codes = [random.integers(0, 256, (rows, MMA_K // 2), dtype=np.uint8) for rows in (LANES * ctas, n)]
    scales = [random_scales(rows, random) for rows in (LANES * ctas, n)]
    b_at, a_scales_at, b_scales_at, size = 4096, 8192, 8192 + 512, 10240
    shared = np.zeros((ctas, size), np.uint8)
    for rank in range(ctas):
        rows, share = slice(LANES * rank, LANES * (rank + 1)), slice(n // ctas * rank, n // ctas * (rank + 1))
        pieces = {
            0: core_matrices(codes[0][rows]),
            b_at: core_matrices(codes[1][share]),
            a_scales_at: core_matrices(scale_rows(scales[0][rows])),
            b_scales_at: core_matrices(scale_rows(scales[1])),
        }
        for at, piece in pieces.items():
            shared[rank, at : at + piece.size] = piece
    before = random_cells(ctas, n + 8, 4)
    instruction = 1 << 7 | 1 << 10 | n // 8 << 17 | LANES * ctas // 128 << 27
    matrices = {5: (0, 16 * LANES), 6: (b_at, 16 * n // ctas), 7: (a_scales_at, 16 * 32), 8: (b_scales_at, 16 * 32)}
    places = " ".join(
        f"mov.u64 %q{register}, {descriptor(at, leading, 128)}; add.s64 %q{register}, %q{register}, %q10;"
        for register, (at, leading) in matrices.items()
    )
    code = f"""{places}
    add.s32 %r26, %r20, {n}; add.s32 %r27, %r20, {n + 4}; mov.u32 %r25, {instruction}; setp.ne.s32 %p5, 0, 0;
    tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [%r26], %q7;
    tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [%r27], %q8;
    tcgen05.mma.cta_group::{ctas}.kind::mxf4nvf4.block_scale.block16
        [%r20], %q5, %q6, %r25, [%r26], [%r27], %p5;"""
    product = dequantize(codes[0], scales[0]) @ dequantize(codes[1], scales[1]).T
    expected = np.zeros((ctas, LANES, n + 8), np.float32)
    expected[:, :, :n] = product.reshape(ctas, LANES, n)
    of_ranks = ((n, scales[0].reshape(ctas, LANES, SCALES)), (n + 4, np.stack([scales[1]] * ctas)))
    for column, of_rank in of_ranks:
        for rank in range(ctas):
            words = np.tile(scale_rows(of_rank[rank]).view(np.uint32), (4, 1))
            expected[rank, :, column : column + 4] = words.view(np.float32)
    name = "block-scaled MMA" + (" of a pair of CTAs" if ctas == 2 else "")
    shows = (
        f"tcgen05.mma.cta_group::{ctas}.kind::mxf4nvf4.block16, M = {LANES * ctas}, N = {n}, with scales by tcgen05.cp"
    )
    return tensor_probe(name, shows, code, shared, before, expected)


def probes() -> list[Probe]:
    """From tensor memory alone to a pair of CTAs."""
    return [tensor_memory(), scale_copy(), block_scaled(1, 64), block_scaled(2, 64)]
