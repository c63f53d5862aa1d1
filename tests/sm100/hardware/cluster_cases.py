"""Clusters: multicast TMA loads, distributed shared memory, arrivals at other CTAs' barriers, stores between CTAs."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.arch.nvvm_wrappers import inline_ptx
from cutlass.cute.nvgpu import cpasync

from tests.sm100.hardware.case import Case, from_bits, untouched

THREADS = 64
BOX = (64, 8)
"""Elements of a TMA box of bf16, with a 128-byte swizzle."""


class Multicast:
    """Each CTA of a cluster loads a box of its own into all CTAs of its group, which keep it in a slot of the sender.

    Args:
        shape: of the cluster.
        group: which CTAs share: "all", "row" (x varies) or "column" (y varies).
    """

    def __init__(self, shape: tuple[int, int], group: str) -> None:
        self.shape = shape
        width, size = shape[0], shape[0] * shape[1]
        self.members = {"all": range(size), "row": range(width), "column": range(0, size, width)}[group]
        self.group = group
        self.nbytes = math.prod(BOX) * 2

    @cute.jit
    def __call__(self, source: Any, dump: Any) -> None:
        layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout(BOX))
        whole = cute.make_tensor(source.iterator, cute.make_layout((152, 40), stride=(1, 152)))
        load, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SMulticastOp(), whole, layout, BOX, num_multicast=1
        )
        self.kernel(load, tensor, dump).launch(
            grid=(2 * self.shape[0], self.shape[1], 1), block=(THREADS, 1, 1), cluster=(*self.shape, 1)
        )

    @cute.kernel
    def kernel(self, load: Any, tensor: Any, dump: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        x, y, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        width, count = self.shape[0], len(self.members)
        first = {"all": rank * 0, "row": rank - rank % width, "column": rank % width}[self.group]
        barrier = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        words = cute.arch.alloc_smem(cutlass.Uint32, math.prod(self.shape) * self.nbytes // 4, alignment=1024)
        slots = cute.make_tensor(
            words, cute.make_layout((math.prod(self.shape), self.nbytes // 4), stride=(self.nbytes // 4, 1))
        )
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * self.nbytes)
        cute.arch.cluster_arrive_relaxed()  # the fence has released the barrier's state
        cute.arch.cluster_wait()
        if warp == 0:
            mine = cute.make_tensor(
                cute.recast_ptr(words + rank * (self.nbytes // 4), cute.make_swizzle(3, 4, 3), dtype=cutlass.BFloat16),
                cute.make_layout(BOX),
            )
            tile = cute.local_tile(cute.domain_offset((x * 40 - 8, y * 6 + 1), tensor), BOX, (0, 0))
            part, tile = cpasync.tma_partition(
                load, 0, cute.make_layout(1), cute.group_modes(mine, 0, 2), cute.group_modes(tile, 0, 2)
            )
            mask = cutlass.Int16(sum(1 << member for member in self.members)) << cutlass.Int16(first)
            cute.copy(load, tile, part, tma_bar_ptr=barrier, mcast_mask=cutlass.Int16(mask))
        cute.arch.mbarrier_wait(barrier, 0)
        block = y * (2 * width) + x
        for member in cutlass.range_constexpr(count):
            slot = first + self.members[member]
            for word in range(thread, self.nbytes // 4, THREADS):
                dump[block, member, word] = slots[slot, word]
        cute.arch.cluster_arrive(aligned=True)
        cute.arch.cluster_wait()


def multicast_case(name: str, shape: tuple[int, int], group: str) -> Case:
    """A multicast in two clusters of ``shape``."""
    kernel = Multicast(shape, group)
    bits = np.random.default_rng(7).integers(0, 2**16, 152 * 40, dtype=np.uint16)
    dump = untouched((2 * math.prod(shape), len(kernel.members), kernel.nbytes // 4), torch.int32)
    return Case(name, kernel, {"source": from_bits(bits, torch.bfloat16)}, {"dump": dump}, timed=True)


class Exchange:
    """CTAs of a cluster write into each other's shared memory, tell each other by mbarriers, and read each other's.

    In each of ``ROUNDS`` rounds a CTA stores to its partner and arrives there (a release for the cluster), waits for
    its own barrier and passes on what it got; in the end it reads everything that a third CTA holds. The partner may
    be a round ahead, so two barriers take turns.
    """

    ROUNDS = 5
    SIZE = 4

    @cute.jit
    def __call__(self, source: Any, passed: Any, seen: Any, gathered: Any) -> None:
        self.kernel(source, passed, seen, gathered).launch(
            grid=(2 * self.SIZE, 1, 1), block=(THREADS, 1, 1), cluster=(self.SIZE, 1, 1)
        )

    @cute.kernel
    def kernel(self, source: Any, passed: Any, seen: Any, gathered: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        barriers = cute.arch.alloc_smem(cutlass.Int64, 2, alignment=8)
        inbox = cute.arch.alloc_smem(cutlass.Uint32, self.ROUNDS * THREADS, alignment=16)
        mine = cute.make_tensor(inbox, cute.make_layout((self.ROUNDS, THREADS), stride=(THREADS, 1)))
        partner, third = rank ^ 1, (rank + 2) % self.SIZE
        if thread == 0:
            cute.arch.mbarrier_init(barriers, THREADS)
            cute.arch.mbarrier_init(barriers + 1, THREADS)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        value = cutlass.Uint32(source[block, thread])
        for step in cutlass.range_constexpr(self.ROUNDS):
            inline_ptx(
                "{ .reg .b32 there, gate;"
                " mapa.shared::cluster.u32 there, {$r0}, {$r2};"
                " mapa.shared::cluster.u32 gate, {$r1}, {$r2};"
                " st.shared::cluster.u32 [there], {$r3};"
                " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [gate]; }",
                read_only_args=[
                    (inbox + (step * THREADS + thread)).toint(), (barriers + step % 2).toint(),
                    cutlass.Int32(partner), value,
                ],
            )  # fmt: skip
            inline_ptx(
                "{ .reg .pred done; AGAIN:"
                " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};"
                " @!done bra AGAIN; }",
                read_only_args=[(barriers + step % 2).toint(), cutlass.Int32(step // 2 % 2)],
            )
            value = mine[step, thread] * cutlass.Uint32(3) + cutlass.Uint32(step)
        passed[block, thread] = passed.element_type(value)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        for step in cutlass.range_constexpr(self.ROUNDS):
            theirs = inline_ptx(
                "{ .reg .b32 there;"
                " mapa.shared::cluster.u32 there, {$r0}, {$r1}; ld.shared::cluster.u32 {$w0}, [there]; }",
                write_only_types=[cutlass.Uint32],
                read_only_args=[(inbox + (step * THREADS + (thread ^ 5))).toint(), cutlass.Int32(third)],
            )
            seen[block, step, thread] = seen.element_type(theirs)
        # Vectors of four to the third CTA, whose other barrier is told without a cluster's release: the fence does it.
        slots = cute.arch.alloc_smem(cutlass.Uint32, 4 * THREADS, alignment=16)
        inline_ptx(
            "{ .reg .b32 there, gate, x;"
            " mapa.shared::cluster.u32 there, {$r0}, {$r2};"
            " mapa.shared::cluster.u32 gate, {$r1}, {$r2};"
            " not.b32 x, {$r3};"
            " st.shared::cluster.v4.f32 [there], { {$r3}, x, {$r3}, x };"
            " fence.acq_rel.cluster;"
            " mbarrier.arrive.shared::cluster.b64 _, [gate]; }",
            read_only_args=[
                (slots + 4 * thread).toint(), (barriers + 1).toint(), cutlass.Int32(third), value
            ],
        )  # fmt: skip
        cute.arch.mbarrier_wait(barriers + 1, self.ROUNDS // 2 % 2)
        cute.arch.fence_acq_rel_cluster()
        received = cute.make_tensor(slots, cute.make_layout(4 * THREADS))
        for word in cutlass.range_constexpr(4):
            gathered[block, word, thread] = gathered.element_type(received[4 * thread + word])
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


def exchange_case() -> Case:
    blocks = 2 * Exchange.SIZE
    source = np.random.default_rng(8).integers(0, 2**32, (blocks, THREADS), dtype=np.uint32)
    outputs = {
        "passed": untouched((blocks, THREADS), torch.int32),
        "seen": untouched((blocks, Exchange.ROUNDS, THREADS), torch.int32),
        "gathered": untouched((blocks, 4, THREADS), torch.int32),
    }
    return Case(
        "distributed shared memory", Exchange(), {"source": from_bits(source, torch.int32)}, outputs, timed=True
    )


class AsynchronousExchange:
    """CTAs of a cluster store into each other's shared memory by st.async, and an mbarrier there counts the bytes.

    Each thread sends a vector of four to the next CTA and a word to the one after. In every second round bytes are
    expected only after some may have come. Between rounds an arrival tells the senders that what they sent is read.
    """

    ROUNDS = 3
    SIZE = 4

    @cute.jit
    def __call__(self, source: Any, received: Any) -> None:
        self.kernel(source, received).launch(
            grid=(2 * self.SIZE, 1, 1), block=(THREADS, 1, 1), cluster=(self.SIZE, 1, 1)
        )

    @cute.kernel
    def kernel(self, source: Any, received: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        full = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        empty = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        inbox = cute.arch.alloc_smem(cutlass.Float32, 5 * THREADS, alignment=16)
        mine = cute.make_tensor(inbox, cute.make_layout(5 * THREADS))
        if thread == 0:
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init(empty, 2 * THREADS)
            cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive_relaxed(aligned=True)
        cute.arch.cluster_wait()
        for step in cutlass.range_constexpr(self.ROUNDS):
            if thread == 0 and step % 2 == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, 5 * 4 * THREADS)
            value = source[block, step, thread]
            if step > 0:
                self.wait(empty, step - 1)
            inline_ptx(
                "{ .reg .b32 there, gate; .reg .f32 x;"
                " mapa.shared::cluster.u32 there, {$r0}, {$r2};"
                " mapa.shared::cluster.u32 gate, {$r1}, {$r2};"
                " neg.f32 x, {$r3};"
                " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                " [there], { {$r3}, x, {$r3}, x }, [gate]; }",
                read_only_args=[
                    (inbox + 4 * thread).toint(), full.toint(), cutlass.Int32((rank + 1) % self.SIZE), value,
                ],
            )  # fmt: skip
            inline_ptx(
                "{ .reg .b32 there, gate;"
                " mapa.shared::cluster.u32 there, {$r0}, {$r2};"
                " mapa.shared::cluster.u32 gate, {$r1}, {$r2};"
                " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], {$r3}, [gate]; }",
                read_only_args=[
                    (inbox + 4 * THREADS + thread).toint(), full.toint(), cutlass.Int32((rank + 2) % self.SIZE), value,
                ],
            )  # fmt: skip
            if thread == 0 and step % 2 == 1:
                cute.arch.mbarrier_arrive_and_expect_tx(full, 5 * 4 * THREADS)
            self.wait(full, step)
            for word in cutlass.range_constexpr(5):
                place = 4 * thread + word if word < 4 else 4 * THREADS + thread
                received[block, step, word, thread] = mine[place]
            if step + 1 < self.ROUNDS:
                for sender in cutlass.range_constexpr(1, 3):
                    inline_ptx(
                        "{ .reg .b32 gate; mapa.shared::cluster.u32 gate, {$r0}, {$r1};"
                        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [gate]; }",
                        read_only_args=[empty.toint(), cutlass.Int32((rank + self.SIZE - sender) % self.SIZE)],
                    )

    def wait(self, barrier: Any, step: int) -> None:
        inline_ptx(
            "{ .reg .pred done; AGAIN:"
            " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};"
            " @!done bra AGAIN; }",
            read_only_args=[barrier.toint(), cutlass.Int32(step % 2)],
        )


def asynchronous_exchange_case() -> Case:
    blocks, rounds = 2 * AsynchronousExchange.SIZE, AsynchronousExchange.ROUNDS
    source = np.random.default_rng(9).standard_normal((blocks, rounds, THREADS), np.float32)
    return Case(
        "asynchronous stores",
        AsynchronousExchange(),
        {"source": torch.from_numpy(source)},
        {"received": untouched((blocks, rounds, 5, THREADS), torch.float32)},
        timed=True,
    )


def cases() -> list[Case]:
    """Multicasts and exchanges."""
    return [
        multicast_case("multicast in a cluster of 2", (2, 1), "all"),
        multicast_case("multicast along rows of 2x2", (2, 2), "row"),
        multicast_case("multicast along columns of 2x2", (2, 2), "column"),
        multicast_case("multicast to all of 2x2", (2, 2), "all"),
        exchange_case(),
        asynchronous_exchange_case(),
    ]
