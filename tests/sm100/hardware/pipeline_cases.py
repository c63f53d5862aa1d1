"""Warp-specialised kernels: TMA pipelines through several turns of their stages, and named barriers."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import numpy as np
import torch
from cutlass.cute.nvgpu import cpasync

from tests.sm100.hardware.case import Case, from_bits, untouched
from tests.sm100.hardware.tma_cases import swizzle_of


class TmaPipeline:
    """One warp loads tiles, four change them, the result leaves by TMA from a buffer of two stages.

    The consumers carry a value from tile to tile, so a tile that is skipped or read twice spoils all later ones. The
    tiles are ragged in both directions, and there are as many as fill the stages three times and some.
    """

    STAGES, TILES_M, TILES_N = 3, 4, 3
    BOX = (32, 16)
    M, N = 116, 41
    CONSUMERS = 128

    @cute.jit
    def __call__(self, source: Any, target: Any) -> None:
        layout = cute.make_composed_layout(swizzle_of(128), 0, cute.make_layout(self.BOX))
        whole = cute.make_layout((self.M, self.N), stride=(1, self.M))
        load, load_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), cute.make_tensor(source.iterator, whole), layout, self.BOX
        )
        store, store_tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), cute.make_tensor(target.iterator, whole), layout, self.BOX
        )
        self.kernel(load, load_tensor, store, store_tensor).launch(grid=(2, 1, 1), block=(self.CONSUMERS + 32, 1, 1))

    @cute.jit
    def stages(self, count: cutlass.Constexpr) -> Any:
        """A swizzled buffer [box…, stage] in shared memory."""
        m, n = self.BOX
        words = cute.arch.alloc_smem(cutlass.Float32, m * n * count, alignment=1024)
        return cute.make_tensor(
            cute.recast_ptr(words, swizzle_of(128), dtype=cutlass.Float32), cute.make_layout((m, n, count))
        )

    @cute.jit
    def partition(self, atom: Any, tensor: Any, shared: Any) -> Any:
        """Shared stages and the tensor's tiles, as TMA takes them."""
        tiles = cute.zipped_divide(tensor, self.BOX)
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), tiles)

    @cute.kernel
    def kernel(self, load: Any, load_tensor: Any, store: Any, store_tensor: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        m, n = self.BOX
        if warp == 0:
            cpasync.prefetch_descriptor(load)
            cpasync.prefetch_descriptor(store)
        barriers = cute.arch.alloc_smem(cutlass.Int64, 2 * self.STAGES, alignment=8)
        loaded, stored = self.stages(self.STAGES), self.stages(2)
        tiles = pipeline.PipelineTmaAsync.create(
            num_stages=self.STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.CONSUMERS // 32),
            tx_count=m * n * 4,
            barrier_storage=barriers,
        )
        consumers = pipeline.NamedBarrier(1, self.CONSUMERS)
        # The first block takes the even tiles, in order of M; the second the odd ones.
        if warp == self.CONSUMERS // 32:
            part, tile = self.partition(load, load_tensor, loaded)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.STAGES)
            for number in cutlass.range(block, self.TILES_M * self.TILES_N, 2, unroll=1):
                tiles.producer_acquire(state)
                cute.copy(
                    load,
                    tile[None, (number % self.TILES_M, number // self.TILES_M)],
                    part[None, state.index],
                    tma_bar_ptr=tiles.producer_get_barrier(state),
                )
                tiles.producer_commit(state)
                state.advance()
            tiles.producer_tail(state)
        else:
            part, tile = self.partition(store, store_tensor, stored)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.STAGES)
            leaving = pipeline.PipelineTmaStore.create(
                num_stages=2, producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.CONSUMERS)
            )
            carried = cutlass.Float32(0.5)
            stage = cutlass.Int32(0)
            for number in cutlass.range(block, self.TILES_M * self.TILES_N, 2, unroll=1):
                tiles.consumer_wait(state)
                for row in cutlass.range_constexpr(m * n // self.CONSUMERS):
                    i, j = thread % m, thread // m + row * (self.CONSUMERS // m)
                    value = loaded[i, j, state.index]
                    carried = carried * cutlass.Float32(0.75) + value
                    stored[i, j, stage] = carried
                cute.arch.sync_warp()
                tiles.consumer_release(state)
                state.advance()
                cute.arch.fence_proxy("async.shared", space="cta")
                consumers.arrive_and_wait()
                if warp == 0:
                    cute.copy(store, part[None, stage], tile[None, (number % self.TILES_M, number // self.TILES_M)])
                    leaving.producer_commit()
                    leaving.producer_acquire()
                consumers.arrive_and_wait()
                stage = stage ^ 1
            if warp == 0:
                leaving.producer_tail()


def tma_pipeline_case() -> Case:
    count = TmaPipeline.M * TmaPipeline.N
    values = np.random.default_rng(9).standard_normal(count).astype(np.float32)
    return Case(
        "tma pipeline", TmaPipeline(), {"source": torch.from_numpy(values)},
        {"target": untouched((count,), torch.float32)}, timed=True,
    )  # fmt: skip


class NamedBarriers:
    """Pairs of warps hand a buffer to and fro by ``bar.arrive`` and ``bar.sync``, each pair by its own barriers."""

    ROUNDS = 6

    @cute.jit
    def __call__(self, source: Any, target: Any) -> None:
        self.kernel(source, target).launch(grid=(1, 1, 1), block=(128, 1, 1))

    @cute.kernel
    def kernel(self, source: Any, target: Any) -> None:
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        pair = warp // 2
        buffer = cute.make_tensor(
            cute.arch.alloc_smem(cutlass.Uint32, 2 * 32, alignment=16), cute.make_layout((2, 32), stride=(32, 1))
        )
        full, empty = 1 + 2 * pair, 2 + 2 * pair
        for step in cutlass.range_constexpr(self.ROUNDS):
            if warp % 2 == 0:
                if cutlass.const_expr(step > 0):
                    cute.arch.barrier(barrier_id=empty, number_of_threads=64)
                buffer[pair, lane] = cutlass.Uint32(source[step, pair, lane])
                cute.arch.barrier_arrive(barrier_id=full, number_of_threads=64)
            else:
                cute.arch.barrier(barrier_id=full, number_of_threads=64)
                target[step, pair, lane] = target.element_type(buffer[pair, lane ^ 9])
                if cutlass.const_expr(step < self.ROUNDS - 1):
                    cute.arch.barrier_arrive(barrier_id=empty, number_of_threads=64)


def named_barrier_case() -> Case:
    shape = (NamedBarriers.ROUNDS, 2, 32)
    source = np.random.default_rng(10).integers(0, 2**32, shape, dtype=np.uint32)
    return Case(
        "named barriers", NamedBarriers(), {"source": from_bits(source, torch.int32)},
        {"target": untouched(shape, torch.int32)}, timed=True,
    )  # fmt: skip


def cases() -> list[Case]:
    """Pipelines and hand-overs."""
    return [tma_pipeline_case(), named_barrier_case()]
