"""Programmatic dependent launch: a kernel's programs are placed on the chip while the previous kernel still runs.

Most kernels of a decode pass are shorter than the gap that an ordinary launch leaves between two of them. With a
dependent launch, programs of the next kernel take the places that become free, and wait there. A decode graph of six
layers of a tiny model takes 585 µs instead of 655, with the same bits (``launch/results/tunings_h200.md``).

Every kernel begins with :func:`after_previous` and is launched with :data:`OVERLAPPED`; only attention is launched the
ordinary way (``attention/sparse_attention.py`` says why). The compile checks of the tests refuse a kernel that touches
memory before it. A kernel launched the ordinary way after one of these waits until that one has completed, as always.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .rounding import INTERPRETED

OVERLAPPED: dict[str, Any] = {} if INTERPRETED.value else {"launch_pdl": True}
"""Launch option of the kernels that begin with :func:`after_previous`, but attention's, and of no others; empty in the
interpreter."""


@triton.jit
def after_previous():
    """Wait until the previous kernel has completed and its stores are visible; then let the next kernel be placed.

    It must be a kernel's first statement: a program that read or wrote memory before it would race with the previous
    kernel.
    """
    if not INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_constants(pointers):
    """Ask L2 for the lines at ``pointers``, a block of addresses of constants such as weights; nothing is read.

    Before :func:`after_previous`: the lines come from memory while the previous kernel still runs, or while what it
    wrote is read. Loads of them after it then wait for L2 alone.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
