"""ldmatrix and stmatrix of every count, straight and transposed."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from tests.sm100.hardware.case import Case, from_bits, untouched

WORDS = 512
"""A buffer of 128 rows of 16 bytes, of which a warp takes up to 32, scattered."""
FORMS = [(count, trans) for count in (1, 2, 4) for trans in ("", ".trans")]


class MatrixTransfers:
    """One warp: each form of ldmatrix on a random buffer, then each form of stmatrix into another."""

    @cute.jit
    def __call__(self, source: Any, rows: Any, loaded: Any, stored: Any) -> None:
        self.kernel(source, rows, loaded, stored).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, source: Any, rows: Any, loaded: Any, stored: Any) -> None:
        lane, _, _ = cute.arch.thread_idx()
        words = cute.arch.alloc_smem(cutlass.Uint32, WORDS, alignment=128)
        buffer = cute.make_tensor(words, cute.make_layout(WORDS))
        address = words.toint() + cutlass.Int32(rows[lane]) * 16
        for form in cutlass.range_constexpr(len(FORMS)):
            count, trans = FORMS[form]
            opcode = f"sync.aligned.m8n8.x{count}{trans}.shared.b16"
            self.fill(buffer, source, 0, lane)
            places = ", ".join([f"{{$w{i}}}" for i in range(count)])
            found = inline_ptx(
                f"ldmatrix.{opcode} {{ {places} }}, [{{$r0}}];",
                write_only_types=[cutlass.Uint32] * count, read_only_args=[address],
            )  # fmt: skip
            registers = found if count > 1 else (found,)
            for i in cutlass.range_constexpr(count):
                loaded[form, i, lane] = loaded.element_type(registers[i])
            cute.arch.sync_warp()
            self.fill(buffer, source, 1, lane)
            places = ", ".join([f"{{$r{i + 1}}}" for i in range(count)])
            values = [cutlass.Uint32(source[2, form * 64 + i * 32 + lane]) for i in range(count)]
            inline_ptx(f"stmatrix.{opcode} [{{$r0}}], {{ {places} }};", read_only_args=[address, *values])
            cute.arch.sync_warp()
            for word in cutlass.range_constexpr(WORDS // 32):
                stored[form, word * 32 + lane] = stored.element_type(buffer[word * 32 + lane])
            cute.arch.sync_warp()

    @cute.jit
    def fill(self, buffer: Any, source: Any, row: cutlass.Constexpr, lane: Any) -> None:
        """Put a row of the source into the buffer."""
        for word in cutlass.range_constexpr(WORDS // 32):
            buffer[word * 32 + lane] = cutlass.Uint32(source[row, word * 32 + lane])
        cute.arch.sync_warp()


def cases() -> list[Case]:
    """The one case of all forms."""
    random = np.random.default_rng(12)
    source = random.integers(0, 2**32, (3, WORDS), dtype=np.uint32)
    rows = random.permutation(WORDS // 4)[:32].astype(np.uint32)
    names = [f"x{count}{trans}" for count, trans in FORMS]
    return [
        Case(
            "matrices", MatrixTransfers(),
            {"source": from_bits(source, torch.int32), "rows": from_bits(rows, torch.int32)},
            {"loaded": untouched((len(FORMS), 4, 32), torch.int32),
             "stored": untouched((len(FORMS), WORDS), torch.int32)},
            {"loaded": [f"ldmatrix {name}" for name in names], "stored": [f"stmatrix {name}" for name in names]},
        )
    ]  # fmt: skip
