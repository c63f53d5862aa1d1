"""Copies without tensor maps: cp.async of single elements, bulk copies in both directions and between CTAs."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from tests.sm100.hardware.case import Case, from_bits, untouched

THREADS = 64
STAGES = 3
ROUNDS = 8


class ElementCopies:
    """A ring of cp.async groups: each thread copies 16, 8 and twice 4 bytes a round, some cut short by zeros."""

    PARTS = (("cg", 16, 0), ("ca", 8, 16), ("ca", 4, 24), ("ca", 4, 28))
    """Cache operator, bytes and where they begin in a thread's ``WORDS``."""
    WORDS = 8

    @cute.jit
    def __call__(self, source: Any, sizes: Any, target: Any) -> None:
        self.kernel(source, sizes, target).launch(grid=(2, 1, 1), block=(THREADS, 1, 1))

    @cute.jit
    def copy_round(self, step: cutlass.Constexpr, source: Any, sizes: Any, place: Any, block: Any, thread: Any) -> None:
        """Issue a round's copies of a thread and commit them."""
        stage = place + (step % STAGES * THREADS + thread) * (4 * self.WORDS)
        for part, (opcode, nbytes, begin) in enumerate(self.PARTS):
            inline_ptx(
                f"cp.async.{opcode}.shared.global [{{$r0}}], [{{$r1}}], {nbytes}, {{$r2}};",
                read_only_args=[
                    stage + begin,
                    (source.iterator + ((block * ROUNDS + step) * THREADS + thread) * self.WORDS + begin // 4).toint(),
                    cutlass.Int32(sizes[step, part, thread]),
                ],
            )
        cute.arch.cp_async_commit_group()

    @cute.kernel
    def kernel(self, source: Any, sizes: Any, target: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        words = cute.arch.alloc_smem(cutlass.Uint32, STAGES * THREADS * self.WORDS, alignment=16)
        ring = cute.make_tensor(
            words, cute.make_layout((STAGES, THREADS, self.WORDS), stride=(THREADS * self.WORDS, self.WORDS, 1))
        )
        for step in cutlass.range_constexpr(STAGES - 1):
            self.copy_round(step, source, sizes, words.toint(), block, thread)
        for step in cutlass.range_constexpr(ROUNDS):
            if cutlass.const_expr(step + STAGES - 1 < ROUNDS):
                self.copy_round(step + STAGES - 1, source, sizes, words.toint(), block, thread)
            else:
                cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(STAGES - 1)
            cute.arch.sync_threads()
            for word in cutlass.range_constexpr(self.WORDS):
                # Read what another thread has copied.
                target[block, step, word, thread] = target.element_type(ring[step % STAGES, thread ^ 33, word])
            cute.arch.sync_threads()


def element_case() -> Case:
    random = np.random.default_rng(13)
    source = random.integers(0, 2**32, (2 * ROUNDS, THREADS, ElementCopies.WORDS), dtype=np.uint32)
    full = np.array([nbytes for _, nbytes, _ in ElementCopies.PARTS])[None, :, None]
    shape = ROUNDS, len(ElementCopies.PARTS), THREADS
    sizes = np.where(random.random(shape) < 0.7, full, random.integers(0, full + 1, shape))
    return Case(
        "cp.async", ElementCopies(),
        {"source": from_bits(source, torch.int32), "sizes": from_bits(sizes.astype(np.uint32), torch.int32)},
        {"target": untouched((2, ROUNDS, ElementCopies.WORDS, THREADS), torch.int32)},
        timed=True,
    )  # fmt: skip


class BulkCopies:
    """Global to shared by a bulk copy, on to the other CTA of the pair by another, and back to global memory.

    The stages' sizes differ, so that what is expected and where a copy ends matter.
    """

    SIZES = (16, 48, 512, 1040)

    @cute.jit
    def __call__(self, source: Any, target: Any) -> None:
        self.kernel(source, target).launch(grid=(4, 1, 1), block=(THREADS, 1, 1), cluster=(2, 1, 1))

    @cute.kernel
    def kernel(self, source: Any, target: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        arrived = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        passed = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        words = max(self.SIZES) // 4
        first = cute.arch.alloc_smem(cutlass.Uint32, words, alignment=128)
        second = cute.arch.alloc_smem(cutlass.Uint32, words, alignment=128)
        buffer = cute.make_tensor(second, cute.make_layout(words))
        if thread == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_init(passed, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        for step in cutlass.range_constexpr(len(self.SIZES)):
            nbytes = self.SIZES[step]
            place = (block * len(self.SIZES) + step) * words
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, nbytes)
                cute.arch.mbarrier_arrive_and_expect_tx(passed, nbytes)
                inline_ptx(
                    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                    " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
                    read_only_args=[
                        first.toint(), (source.iterator + place).toint(), cutlass.Int32(nbytes), arrived.toint()
                    ],
                )  # fmt: skip
            cute.arch.mbarrier_wait(arrived, step % 2)
            if thread == 0:
                inline_ptx(
                    "{ .reg .b32 there, gate;"
                    " mapa.shared::cluster.u32 there, {$r0}, {$r4};"
                    " mapa.shared::cluster.u32 gate, {$r3}, {$r4};"
                    " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
                    " [there], [{$r1}], {$r2}, [gate]; }",
                    read_only_args=[
                        second.toint(), first.toint(), cutlass.Int32(nbytes), passed.toint(), cutlass.Int32(rank ^ 1)
                    ],
                )  # fmt: skip
            cute.arch.mbarrier_wait(passed, step % 2)
            for word in range(thread, nbytes // 4, THREADS):
                buffer[word] = buffer[word] + cutlass.Uint32(word)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            if thread == 0:
                inline_ptx(
                    "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                    read_only_args=[(target.iterator + place).toint(), second.toint(), cutlass.Int32(nbytes)],
                )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0)
            # The other CTA writes into this one's second buffer in the next step, and reads its own first.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


def bulk_case() -> Case:
    shape = (4, len(BulkCopies.SIZES), max(BulkCopies.SIZES) // 4)
    source = np.random.default_rng(14).integers(0, 2**32, shape, dtype=np.uint32)
    return Case(
        "bulk copies", BulkCopies(), {"source": from_bits(source, torch.int32)},
        {"target": untouched(shape, torch.int32)}, timed=True,
    )  # fmt: skip


def cases() -> list[Case]:
    """Copies of elements and in bulk."""
    return [element_case(), bulk_case()]
