"""Ordinary loads and stores of every width, in global and shared memory."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from tests.sm100.hardware.case import Case, from_bits, untouched

THREADS = 64
ACCESSES = ("b8", "b16", "b32", "b64", "v2.b32", "v4.b32", "v2.b64", "v2.b16", "v4.b8", "f32")
BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "f32": 4}


def _parts(access: str) -> tuple[int, int]:
    """Number and bytes of the elements of an access."""
    count, _, kind = access.rpartition(".")
    return int(count[1:] or 1), BYTES[kind]


def _copy(load: str, store: str, access: str) -> str:
    """PTX that copies one access from r0 to r1."""
    count, size = _parts(access)
    names = [f"x{i}" for i in range(count)]
    held = "{ " + ", ".join(names) + " }" if count > 1 else names[0]
    # 8-bit elements live in registers of 16 bits.
    kind = "f32" if access == "f32" else f"b{max(16, 8 * size)}"
    declared = f".reg .{kind} " + ", ".join(names)
    return f"{{ {declared}; {load}.{access} {held}, [{{$r0}}]; {store}.{access} [{{$r1}}], {held}; }}"


class Accesses:
    """Each access in turn: from global to shared memory by one thread, and on to global memory by another."""

    @cute.jit
    def __call__(self, source: Any, target: Any) -> None:
        self.kernel(source, target).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, source: Any, target: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        buffer = cute.arch.alloc_smem(cutlass.Uint32, THREADS * 4, alignment=16).toint()
        for row in cutlass.range_constexpr(len(ACCESSES)):
            count, size = _parts(ACCESSES[row])
            place = row * THREADS * 16
            inline_ptx(
                _copy("ld.global", "st.shared", ACCESSES[row]),
                read_only_args=[
                    source.iterator.toint() + place + thread * count * size, buffer + thread * count * size
                ],
            )  # fmt: skip
            cute.arch.sync_threads()
            other = thread ^ 37
            inline_ptx(
                _copy("ld.shared", "st.global", ACCESSES[row]),
                read_only_args=[
                    buffer + other * count * size, target.iterator.toint() + place + thread * count * size
                ],
            )  # fmt: skip
            cute.arch.sync_threads()


def cases() -> list[Case]:
    """The one case of all widths."""
    shape = (len(ACCESSES), THREADS * 4)
    source = np.random.default_rng(18).integers(0, 2**32, shape, dtype=np.uint32)
    return [
        Case(
            "accesses", Accesses(), {"source": from_bits(source, torch.int32)},
            {"target": untouched(shape, torch.int32)}, {"target": ACCESSES},
        )
    ]  # fmt: skip
