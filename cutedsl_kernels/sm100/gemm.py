"""NVFP4 x NVFP4 products on SM100's block-scaled tensor cores: one kernel for every shape, schedule and epilogue.

Computes, for each group (or expert) g, token row t and feature f::

    acc      = sum over k of (code * block_scale)(tokens[t, k]) * (code * block_scale)(weights[g, f, k])     fp32
    out[t,f] = epilogue(acc)                                                          see epilogue.py

Operands: E2M1 codes, two a byte, low nibble first, K contiguous; E4M3 block scales for each 16 of K in the 128x4
swizzled layout. K a multiple of 64 (32 bytes of codes; K tails are zero-filled by TMA); any number of tokens; features
whose output rows are whole 16 bytes, since a TMA store writes no less (seen on an H200). Weights are the A operand,
tokens the B operand (shape.py says why).

Warps: one or two teams of four for the epilogue (each warp reads its quarter of tensor memory, the teams take turns at
a tile's chunks), one that issues the MMAs, one for the TMA loads. The roles meet in two rings of mbarriers: operand
stages between TMA and MMA, two accumulator buffers between MMA and epilogue. CTAs are persistent; the epilogue of one
tile runs beside the main loop of the next. Programmatic dependent launch: each CTA prepares itself, and but for experts
sends for the weights of its first stages, before the previous kernel has ended.

Numerics: products and sums inside the tensor core are the hardware's (fp32 accumulators); all that follows is fp32
with one rounding to the output type. The result does not depend on timing. With split_k the partial sums are added in
the order of their slices.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from .barriers import WARPS_OF_EPILOGUE, Ring, fence_after_wait, fence_before_signal
from .fragment import EpilogueWarp, make_fragment, read_fragment
from .load import EVICT_FIRST, EVICT_LAST, OperandLoad
from .schedule import BatchedSchedule, GroupedSchedule, Place
from .shape import (
    ALIGNMENT,
    BLOCK,
    EXPERT_TABLE_WORDS,
    LANES,
    SCALE_ATOM_BYTES,
    SCALE_ATOM_ROWS,
    TILE_K,
    WARP_LANES,
    KernelShape,
)
from .split import ClusterReduction

K_MAJOR = cute.nvgpu.OperandMajorMode.K


def scale_layout(rows: Any, k: Any, groups: Any, row_stride: Any, group_stride: Any) -> cute.Layout:
    """Block scales as ((32, 4, row atoms), (16, 4, K atoms), groups) in bytes; strides of atoms and groups given."""
    return cute.make_layout(
        (((32, 4), cute.ceil_div(rows, SCALE_ATOM_ROWS)), ((BLOCK, 4), cute.ceil_div(k, 4 * BLOCK)), groups),
        stride=(((16, 4), row_stride), ((0, 1), SCALE_ATOM_BYTES), group_stride),
    )


class NvFp4Gemm:
    """A kernel of one :class:`KernelShape`; call it inside ``cute.compile``."""

    def __init__(self, shape: KernelShape, epilogue: Any) -> None:
        self.shape, self.epilogue = shape, epilogue
        self.group = tcgen05.CtaGroup.TWO if shape.pair else tcgen05.CtaGroup.ONE
        self.ctas = 2 if shape.pair else 1
        self.sharing = (self.ctas * shape.shared_tokens, shape.shared_weights)
        """CTAs of a cluster that share operands, along features and along tokens."""
        self.tiler = (shape.tile_features, shape.token_tile, TILE_K)
        self.scale_tiler = (LANES, max(shape.token_tile, SCALE_ATOM_ROWS), TILE_K)
        """Of the tokens' block scales: whole atoms, and all of them in each CTA of a pair."""

    # Host side, traced once per compilation.

    def _mma(self, group: Any, tiler: Any) -> cute.TiledMma:
        return sm100_utils.make_blockscaled_trivial_tiled_mma(
            cutlass.Float4E2M1FN, cutlass.Float4E2M1FN, K_MAJOR, K_MAJOR, cutlass.Float8E4M3FN, BLOCK, group, tiler[:2]
        )

    def _shared_layouts(self, mma: cute.TiledMma) -> tuple[Any, Any, Any, Any]:
        """Of the staged operands in shared memory: weights, tokens, their block scales (static, so made anywhere)."""
        stages, fp4 = self.shape.stages, cutlass.Float4E2M1FN
        return (
            sm100_utils.make_smem_layout_a(mma, self.tiler, fp4, stages),
            sm100_utils.make_smem_layout_b(mma, self.tiler, fp4, stages),
            blockscaled.make_smem_layout_sfa(mma, self.tiler, BLOCK, stages),
            blockscaled.make_smem_layout_sfb(mma, self.tiler, BLOCK, stages),
        )

    def _shared_operands(self, storage: Any, mma: cute.TiledMma) -> tuple[Any, Any, Any, Any]:
        """The staged operands: weights, tokens, their block scales."""
        a, b, sfa, sfb = self._shared_layouts(mma)
        return (
            storage.a.get_tensor(a.outer, swizzle=a.inner),
            storage.b.get_tensor(b.outer, swizzle=b.inner),
            storage.sfa.get_tensor(sfa),
            storage.sfb.get_tensor(sfb),
        )

    @cute.jit
    def __call__(
        self,
        weights: cute.Pointer,
        weight_scales: cute.Pointer,
        tokens: cute.Pointer,
        token_scales: cute.Pointer,
        epilogue_pointers: Any,
        offsets: Any,
        counts: Any,
        features: Int32,
        k: Int32,
        rows: Int32,
        groups: Int32,
        token_strides: Any,
        scale_strides: Any,
        epilogue_sizes: Any,
        clusters: Int32,
        stream: Any,
        use_pdl: cutlass.Constexpr = False,
    ):
        """Launch.

        Args:
            weights: E2M1 codes [groups, features, k]; rows of gated kernels as ``shape.py`` says.
            weight_scales: their block scales, swizzled, one padded matrix after the other.
            tokens: E2M1 codes, row r of group g at ``r * token_strides[0] + g * token_strides[1]`` elements.
            token_scales: their block scales in atoms of 128 rows (of one token tile, if that is smaller) by 64 of K;
                atoms of 64 of K adjacent, of rows and groups at ``scale_strides`` bytes.
            epilogue_pointers, epilogue_sizes: see the epilogue.
            offsets, counts: of the grouped schedule, else None.
            rows: token rows in all.
            clusters: persistent clusters to launch.
        """
        shape = self.shape
        mma, scale_mma = self._mma(self.group, self.tiler), self._mma(tcgen05.CtaGroup.ONE, self.scale_tiler)
        ctas = cute.tiled_divide(cute.make_layout((*self.sharing, 1)), (mma.thr_id.shape,))
        scale_ctas = cute.tiled_divide(cute.make_layout((*self.sharing, 1)), (scale_mma.thr_id.shape,))
        a_layout, b_layout, sfa_layout, sfb_layout = self._shared_layouts(mma)
        a = cute.make_tensor(
            weights, cute.make_layout((features, k, groups), stride=(Int64(k), 1, Int64(features) * k))
        )
        b = cute.make_tensor(
            tokens, cute.make_layout((rows, k, groups), stride=(token_strides[0], 1, token_strides[1]))
        )
        k_atoms = cute.ceil_div(k, 4 * BLOCK)
        atom_row = Int64(k_atoms) * SCALE_ATOM_BYTES
        sfa = cute.make_tensor(
            weight_scales,
            scale_layout(features, k, groups, atom_row, atom_row * cute.ceil_div(features, SCALE_ATOM_ROWS)),
        )
        token_tiles = cute.ceil_div(rows, shape.token_tile)
        # A narrow token tile has atoms of its own; the second atom of a wide one may lie beyond the last row.
        scale_rows = token_tiles * SCALE_ATOM_ROWS if shape.token_tile < SCALE_ATOM_ROWS else rows
        sfb = cute.make_tensor(token_scales, scale_layout(scale_rows, k, groups, scale_strides[0], scale_strides[1]))

        def one(layout: Any) -> Any:
            return cute.slice_(layout, (None, None, None, 0))

        load_a = sm100_utils.cluster_shape_to_tma_atom_A(self.sharing, mma.thr_id)
        load_b = sm100_utils.cluster_shape_to_tma_atom_B(self.sharing, mma.thr_id)
        load_sfb = sm100_utils.cluster_shape_to_tma_atom_SFB(self.sharing, mma.thr_id)
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        tma_a = make_a(load_a, a, one(a_layout), self.tiler, mma, ctas.shape)
        tma_b = make_b(load_b, b, one(b_layout), self.tiler, mma, ctas.shape)
        tma_sfa = make_a(load_a, sfa, one(sfa_layout), self.tiler, mma, ctas.shape, internal_type=cutlass.Int16)
        tma_sfb = make_b(
            load_sfb, sfb, one(sfb_layout), self.scale_tiler, scale_mma, scale_ctas.shape,
            internal_type=cutlass.Int16,
        )  # fmt: skip
        feature_tiles = cute.ceil_div(features, shape.tile_features)
        outputs = self.epilogue.host(shape, epilogue_pointers, epilogue_sizes, features, rows, groups)
        self.storage = self._storage(a_layout, b_layout, sfa_layout, sfb_layout)
        self.kernel(
            mma, scale_mma, *tma_a, *tma_b, *tma_sfa, *tma_sfb, outputs, offsets, counts,
            feature_tiles, token_tiles, groups, cute.ceil_div(k, TILE_K), ctas, scale_ctas,
        ).launch(
            grid=(clusters * shape.cluster, 1, 1),
            block=(shape.threads, 1, 1),
            cluster=(shape.cluster, 1, 1),
            smem=self.storage.size_in_bytes(),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=use_pdl,
        )  # fmt: skip

    def _storage(self, a_layout: Any, b_layout: Any, sfa_layout: Any, sfb_layout: Any) -> Any:
        shape = self.shape

        @cute.struct
        class Storage:
            operand_full: cute.struct.MemRange[Int64, shape.stages]
            operand_empty: cute.struct.MemRange[Int64, shape.stages]
            accumulator_full: cute.struct.MemRange[Int64, 2]
            accumulator_empty: cute.struct.MemRange[Int64, 2]
            partials_full: cute.struct.MemRange[Int64, 4]
            partials_empty: cute.struct.MemRange[Int64, 4]
            tensor_memory: Int32
            experts: cute.struct.MemRange[Int32, EXPERT_TABLE_WORDS if shape.grouped else 1]
            row_factors: cute.struct.Align[cute.struct.MemRange[Float32, shape.teams * 2 * shape.token_tile], 16]
            partials: cute.struct.Align[cute.struct.MemRange[Float32, max(shape.partial_bytes // 4, 4)], 16]
            transpose: cute.struct.Align[cute.struct.MemRange[Float32, max(shape.transpose_bytes // 4, 4)], 16]
            output: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, max(shape.staging_bytes, 16)], ALIGNMENT]
            a: cute.struct.Align[cute.struct.MemRange[cutlass.Float4E2M1FN, cute.cosize(a_layout.outer)], ALIGNMENT]
            b: cute.struct.Align[cute.struct.MemRange[cutlass.Float4E2M1FN, cute.cosize(b_layout.outer)], ALIGNMENT]
            sfa: cute.struct.Align[cute.struct.MemRange[cutlass.Float8E4M3FN, cute.cosize(sfa_layout)], ALIGNMENT]
            sfb: cute.struct.Align[cute.struct.MemRange[cutlass.Float8E4M3FN, cute.cosize(sfb_layout)], ALIGNMENT]

        return Storage

    # Device side.

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        scale_mma: cute.TiledMma,
        atom_a: cute.CopyAtom,
        a: cute.Tensor,
        atom_b: cute.CopyAtom,
        b: cute.Tensor,
        atom_sfa: cute.CopyAtom,
        sfa: cute.Tensor,
        atom_sfb: cute.CopyAtom,
        sfb: cute.Tensor,
        outputs: Any,
        offsets: Any,
        counts: Any,
        feature_tiles: Int32,
        token_tiles: Int32,
        groups: Int32,
        k_tiles: Int32,
        ctas: cute.Layout,
        scale_ctas: cute.Layout,
    ):
        shape = self.shape
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        epilogue_warps = WARPS_OF_EPILOGUE * shape.teams
        mma_warp, load_warp = epilogue_warps, epilogue_warps + 1
        rank = Int32(0)
        if cutlass.const_expr(shape.cluster > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        # In a pair, the CTA of even rank issues the MMAs of both.
        peer = rank % 2 if cutlass.const_expr(shape.pair) else Int32(0)
        along_features, along_tokens = Int32(0), Int32(0)
        if cutlass.const_expr(shape.pair):
            along_features, along_tokens = rank % self.sharing[0] // 2, rank // self.sharing[0]
        place = Place(shape.shared_tokens, shape.shared_weights, along_features, along_tokens)
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        first, step = block // shape.cluster, grid // shape.cluster
        k_begin, k_end = Int32(0), k_tiles
        if cutlass.const_expr(shape.split_k > 1):
            k_begin = rank * k_tiles // shape.split_k
            k_end = (rank + 1) * k_tiles // shape.split_k

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        operands = Ring(storage.operand_full.data_ptr(), storage.operand_empty.data_ptr(), shape.stages)
        buffers = 1 if shape.overlap else 2
        accumulators = Ring(storage.accumulator_full.data_ptr(), storage.accumulator_empty.data_ptr(), buffers)
        own = EpilogueWarp(warp // WARPS_OF_EPILOGUE, warp % WARPS_OF_EPILOGUE, thread % WARP_LANES)
        exchange = storage.partials.data_ptr(), storage.partials_full.data_ptr(), storage.partials_empty.data_ptr()
        reduction = ClusterReduction(shape, rank, *exchange, own.quarter, own.lane)
        if warp == load_warp:
            for atom in (atom_a, atom_b, atom_sfa, atom_sfb):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                # A stage is free once every MMA that reads what this CTA loads is done with it.
                operands.initialise(1, shape.shared_tokens + shape.shared_weights - 1)
                accumulators.initialise(1, epilogue_warps * self.ctas)
                if cutlass.const_expr(shape.split_k > 1):
                    reduction.initialise()
                cute.arch.mbarrier_init_fence()
        if warp == mma_warp:
            cute.arch.alloc_tmem(shape.tensor_columns, storage.tensor_memory.ptr, is_two_cta=shape.pair)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=shape.pair)
        schedule: Any
        if cutlass.const_expr(shape.grouped):
            per_expert = cute.make_layout(groups)
            # The previous kernel of the stream may still be running up to here; it wrote the counts, by which even the
            # weights are chosen.
            cute.arch.griddepcontrol_wait()
            schedule = GroupedSchedule(
                place,
                feature_tiles, shape.token_tile, groups,
                cute.make_tensor(offsets, per_expert), cute.make_tensor(counts, per_expert),
                storage.experts.get_tensor(cute.make_layout(EXPERT_TABLE_WORDS)),
            )  # fmt: skip
            if warp == 0:
                schedule.prepare(thread)
        else:
            schedule = BatchedSchedule(place, feature_tiles, token_tiles, groups)
        self._synchronise()
        total = schedule.total()
        # The next kernel of the stream may start: its CTAs prepare themselves as these leave, then wait for the end.
        # Not before this CTA has its tensor memory: a CTA that waits for this kernel could hold it.
        cute.arch.griddepcontrol_launch_dependents()
        tensor_memory = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tensor_memory.ptr)

        if warp == load_warp:
            atoms = (atom_a, a), (atom_sfa, sfa), (atom_b, b), (atom_sfb, sfb)
            member = rank if cutlass.const_expr(shape.pair) else Int32(0)
            loads = self._loads(storage, mma, scale_mma, atoms, ctas, scale_ctas, member)
            self._load(loads, operands, schedule, total, peer, first, step, k_begin, k_end)
        if warp == mma_warp:
            self._multiply(
                storage,
                operands,
                accumulators,
                total,
                mma,
                tensor_memory,
                ctas,
                rank,
                peer,
                first,
                step,
                k_end - k_begin,
            )
        if warp < epilogue_warps:
            if cutlass.const_expr(not shape.grouped):
                cute.arch.griddepcontrol_wait()
            epilogue = self.epilogue.device(shape, storage, outputs, own)
            if cutlass.const_expr(shape.split_k > 1):
                self._reduce(accumulators, schedule, total, epilogue, reduction, tensor_memory, own, first, step)
            else:
                self._drain(accumulators, schedule, total, epilogue, tensor_memory, own, rank, peer, first, step)
            epilogue.finish()
        # The epilogue has seen the last accumulator, hence every load and commit before it has arrived: the CTAs of the
        # cluster may leave, and no warp reads tensor memory any more.
        self._synchronise()
        if warp == mma_warp:
            cute.arch.dealloc_tmem(tensor_memory, shape.tensor_columns, is_two_cta=shape.pair)

    def _synchronise(self) -> None:
        """All threads of the cluster."""
        if self.shape.cluster > 1:
            cute.arch.cluster_arrive(aligned=True)
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def _loads(self, storage: Any, mma: Any, scale_mma: Any, atoms: Any, ctas: Any, scale_ctas: Any, rank: Any) -> Any:
        """The loads of (weights, their scales, tokens, their scales)."""
        (atom_a, a), (atom_sfa, sfa), (atom_b, b), (atom_sfb, sfb) = atoms
        s_a, s_b, s_sfa, s_sfb = self._shared_operands(storage, mma)
        part, scale_part = mma.get_slice(rank % self.ctas), scale_mma.get_slice(0)
        features, tokens, k = self.tiler
        # With few tokens, weights pass through L2 once while every CTA reads the tokens.
        narrow = self.shape.token_tile < LANES
        once, often = (Int64(EVICT_FIRST), Int64(EVICT_LAST)) if narrow else (None, None)
        make = OperandLoad.create
        return (
            make(atom_a, part.partition_A, a, (features, k), s_a, ctas, 2, rank, once),
            make(atom_sfa, part.partition_A, sfa, (features, k), s_sfa, ctas, 2, rank, once),
            make(atom_b, part.partition_B, b, (tokens, k), s_b, ctas, 1, rank, often),
            make(
                atom_sfb, scale_part.partition_B, sfb, (self.scale_tiler[1], k), s_sfb, scale_ctas, 1, rank, often
            ),
        )  # fmt: skip

    @cute.jit
    def _load_weights(self, loads, operands, position, peer, feature_tile, k_tile, group):
        """Announce a stage's bytes and load its weights."""
        shape = self.shape
        barrier = operands.full + position.index
        if peer == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, shape.stage_bytes * self.ctas)
        for load in loads[:2]:
            load.load(feature_tile, k_tile, group, position.index, barrier)

    @cute.jit
    def _load(self, loads, operands, schedule, total, peer, first, step, k_begin, k_end):
        """The TMA warp: keep the ring of operand stages full."""
        shape = self.shape
        early = Int32(0)
        if cutlass.const_expr(not shape.grouped):
            # Weights do not depend on the previous kernel: fill the ring with them before waiting for it.
            # A cluster without a tile must load nothing: it would end before the loads have.
            early = cutlass.select_(first < total, cutlass.min(Int32(shape.stages), k_end - k_begin), Int32(0))
            first_feature_tile, _, first_group, _, _ = schedule.locate(first)
            ahead = operands.producer()
            for k_tile in cutlass.range(k_begin, k_begin + early, unroll=1):
                self._load_weights(loads, operands, ahead, peer, first_feature_tile, k_tile, first_group)
                ahead.advance()
            cute.arch.griddepcontrol_wait()
        position = operands.producer()
        tile = first
        while tile < total:
            feature_tile, token_tile, weight_group, token_group, _ = schedule.locate(tile)
            for k_tile in cutlass.range(k_begin, k_end, unroll=1):
                if tile != first or k_tile - k_begin >= early:
                    operands.wait_empty(position)
                    self._load_weights(loads, operands, position, peer, feature_tile, k_tile, weight_group)
                for load in loads[2:]:
                    load.load(token_tile, k_tile, token_group, position.index, operands.full + position.index)
                position.advance()
            tile += step

    @cute.jit
    def _multiply(
        self, storage, operands, accumulators, total, mma, tensor_memory, ctas, rank, peer, first, step, k_tiles
    ):  # fmt: skip
        """The MMA warp: block scales to tensor memory, then four MMAs per stage."""
        shape = self.shape
        s_a, s_b, s_sfa, s_sfb = self._shared_operands(storage, mma)
        r_a, r_b = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
        accumulator_layout = mma.make_fragment_C(mma.partition_shape_C(self.tiler[:2])).layout

        def one(layout: Any) -> Any:
            return cute.slice_(layout, (None, None, None, 0))

        def scales(column: int, layout: Any) -> Any:
            return cute.make_tensor(cute.recast_ptr(tensor_memory + column, dtype=cutlass.Float8E4M3FN), layout)

        sfa_layout = blockscaled.make_tmem_layout_sfa(mma, self.tiler, BLOCK, one(s_sfa.layout))
        sfb_layout = blockscaled.make_tmem_layout_sfb(mma, self.tiler, BLOCK, one(s_sfb.layout))
        t_sfa = scales(shape.scales_column, sfa_layout)
        t_sfb = scales(shape.scales_column + shape.weight_scale_columns, sfb_layout)
        copies = self._scale_copy(s_sfa, t_sfa), self._scale_copy(s_sfb, t_sfb)

        operand = operands.consumer()
        accumulator = accumulators.producer()
        buffer = Int32(0)
        stage_mask = buffer_mask = None
        if cutlass.const_expr(shape.pair):
            stage_mask = self._readers(ctas, rank)
            buffer_mask = Int16(3) << Int16(rank)
        if peer == 0:
            tile = first
            while tile < total:
                accumulators.wait_empty(accumulator)
                fence_after_wait()
                target = cute.make_tensor(tensor_memory + buffer * shape.second_accumulator, accumulator_layout)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(k_tiles, unroll=1):
                    operands.wait_full(operand)
                    for copy, source, copied in copies:
                        cute.copy(copy, source[None, None, None, None, operand.index], copied)
                    for phase in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                        mma.set(tcgen05.Field.SFA, t_sfa[None, None, phase].iterator)
                        mma.set(tcgen05.Field.SFB, t_sfb[None, None, phase].iterator)
                        a, b = r_a[None, None, phase, operand.index], r_b[None, None, phase, operand.index]
                        cute.gemm(mma, target, a, b, target)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    self._commit(operands.empty + operand.index, stage_mask)
                    operand.advance()
                self._commit(accumulators.full + accumulator.index, buffer_mask)
                accumulator.advance()
                buffer = buffer ^ 1
                tile += step

    def _readers(self, ctas: cute.Layout, rank: Any) -> Any:
        """Mask of the CTAs whose loads fill this pair's stages: its row and its column of the cluster."""
        pair, *place = ctas.get_flat_coord(rank)
        masks = [
            cpasync.create_tma_multicast_mask(ctas, (member, *place), mcast_mode=mode)
            for member in (pair, pair ^ 1)
            for mode in (1, 2)
        ]
        return masks[0] | masks[1] | masks[2] | masks[3]

    def _commit(self, barrier: Any, mask: Any) -> None:
        """Arrive at ``barrier`` (of the CTAs of ``mask``) once all MMAs and copies issued so far are done."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier, mask, self.group)

    def _scale_copy(self, shared: cute.Tensor, target: cute.Tensor) -> tuple[Any, Any, Any]:
        """The copy of block scales from shared to tensor memory: (copy, source by stage, target)."""
        shared, target = cute.filter_zeros(shared), cute.filter_zeros(target)
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), cutlass.Float8E4M3FN)
        copy = tcgen05.make_s2t_copy(atom, target)
        part = copy.get_slice(0)
        source = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(shared))
        return copy, source, part.partition_D(target)

    @cute.jit
    def _drain(self, accumulators, schedule, total, epilogue, tensor_memory, warp, rank, peer, first, step):
        """An epilogue warp: accumulators to factors, activation, rounding, global memory."""
        shape = self.shape
        position = accumulators.consumer()
        buffer = Int32(0)
        tile = first
        following, fetched = self._fetch(schedule, epilogue, total, tile, peer)
        while tile < total:
            where = following
            alphas = epilogue.begin(fetched)
            following, fetched = self._fetch(schedule, epilogue, total, tile + step, peer)
            accumulators.wait_full(position)
            fence_after_wait()
            values = make_fragment(shape.chunk)
            for turn in cutlass.range(shape.chunks // shape.teams, unroll=1):
                chunk = self._chunk_of(turn * shape.teams + warp.team, buffer)
                column = buffer * shape.second_accumulator + chunk * shape.chunk
                read_fragment(tensor_memory, column, warp, values)
                factors = epilogue.factors(chunk)
                cute.arch.fence_view_async_tmem_load()
                # The first chunks of the teams hold all columns that the next tile's accumulator shares.
                if turn == (0 if shape.overlap else shape.chunks // shape.teams - 1):
                    self._release(accumulators, position, rank - peer)
                epilogue.chunk(values, factors, alphas, turn % shape.warp_buffers, chunk, *where)
            position.advance()
            buffer = buffer ^ 1
            tile += step

    @cute.jit
    def _fetch(self, schedule, epilogue, total, tile, peer):
        """Where an epilogue warp's tile is, and its factors under way; beyond the last tile anything that exists."""
        known = cutlass.select_(tile < total, tile, Int32(0))
        feature_tile, token_tile, weight_group, token_group, inside = schedule.locate(known)
        if cutlass.const_expr(self.shape.pair):
            feature_tile = feature_tile * 2 + peer
        fetched = epilogue.fetch(feature_tile, token_tile, weight_group, token_group)
        return (feature_tile, token_tile, token_group, inside), fetched

    @cute.jit
    def _release(self, accumulators, position, leader):
        """Let the tensor core have the accumulator buffer again: what it may overwrite is in registers."""
        fence_before_signal()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if cutlass.const_expr(self.shape.pair):
                cute.arch.mbarrier_arrive(accumulators.empty + position.index, leader)
            else:
                cute.arch.mbarrier_arrive(accumulators.empty + position.index)

    @cute.jit
    def _reduce(self, accumulators, schedule, total, epilogue, reduction, tensor_memory, warp, first, step):
        """An epilogue warp of a split-K cluster: exchange sums with the other CTAs, finish what this one owns."""
        shape = self.shape
        position = accumulators.consumer()
        buffer, phase = Int32(0), Int32(0)
        tile = first
        following, fetched = self._fetch(schedule, epilogue, total, tile, Int32(0))
        while tile < total:
            where = following
            alphas = epilogue.begin(fetched)
            following, fetched = self._fetch(schedule, epilogue, total, tile + step, Int32(0))
            accumulators.wait_full(position)
            fence_after_wait()
            values = make_fragment(shape.chunk)
            column = buffer * shape.second_accumulator
            if tile != first:
                reduction.wait_empty(phase ^ 1)
            for chunk in cutlass.range(shape.chunks, unroll=1):
                read_fragment(tensor_memory, column + chunk * shape.chunk, warp, values)
                cute.arch.fence_view_async_tmem_load()
                if reduction.owner(chunk) != reduction.rank:
                    reduction.send(values, chunk)
            reduction.signal_full()
            reduction.wait_full(phase)
            for chunk in cutlass.range(shape.chunks, unroll=1):
                if reduction.owner(chunk) == reduction.rank:
                    if cutlass.const_expr(shape.chunks > 1):
                        read_fragment(tensor_memory, column + chunk * shape.chunk, warp, values)
                        cute.arch.fence_view_async_tmem_load()
                    factors = epilogue.factors(chunk)
                    reduction.add(values, chunk)
                    epilogue.chunk(values, factors, alphas, 0, chunk, *where)
            self._release(accumulators, position, Int32(0))
            tile += step
            if tile < total:
                reduction.signal_empty()
            position.advance()
            buffer = buffer ^ 1
            phase = phase ^ 1

    def _chunk_of(self, turn: Any, buffer: Any) -> Any:
        """Which chunk is worked on in turn: the columns shared with the other accumulator buffer come first."""
        if not self.shape.overlap:
            return turn
        return cutlass.select_(buffer == 0, Int32(self.shape.chunks - 1 - turn), Int32(turn))
