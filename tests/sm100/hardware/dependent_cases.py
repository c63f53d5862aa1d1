"""Programmatic dependent launches: a chain of kernels, each of which may start before the one before has ended."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch

from tests.sm100.hardware.case import Case, from_bits, untouched

THREADS = 128
BLOCKS = 6
LINKS = 4


class DependentLaunches:
    """Link i + 1 reads what other blocks of link i wrote, which it may do after ``griddepcontrol.wait`` only."""

    @cute.jit
    def __call__(self, source: Any, chain: Any) -> None:
        for link in cutlass.range_constexpr(LINKS):
            self.kernel(source, chain, link).launch(
                grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1), use_pdl=cutlass.const_expr(link > 0)
            )

    @cute.kernel
    def kernel(self, source: Any, chain: Any, link: cutlass.Constexpr) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        item = block * THREADS + thread
        cute.arch.griddepcontrol_launch_dependents()
        value = cutlass.Uint32(source[item])
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(link > 0):
            before = cutlass.Uint32(chain[link - 1, (item * 5 + 77) % (BLOCKS * THREADS)])
            value = value * cutlass.Uint32(31) + before
        chain[link, item] = chain.element_type(value)


def cases() -> list[Case]:
    """The chain."""
    source = np.random.default_rng(17).integers(0, 2**32, BLOCKS * THREADS, dtype=np.uint32)
    chain = untouched((LINKS, BLOCKS * THREADS), torch.int32)
    return [
        Case("dependent launches", DependentLaunches(), {"source": from_bits(source, torch.int32)}, {"chain": chain})
    ]
