"""Block-scaled GEMMs on SM100's tensor cores, NVFP4 or MXFP8: one kernel for every shape, schedule and epilogue.

Computes, for each group (or expert) g, token row t and feature f::

    acc      = sum over k of (code * block_scale)(tokens[t, k]) * (code * block_scale)(weights[g, f, k])     fp32
    out[t,f] = epilogue(acc)                                                          see epilogue.py

Operands, K contiguous, block scales in the 128x4 swizzled layout. NVFP4: E2M1 codes, two a byte, low nibble first; an
E4M3 scale for each 16 of K; K a multiple of 64. MXFP8: E4M3 codes, a UE8M0 scale for each 32 of K; K a multiple of 32.
K tails are zero-filled by TMA, so that the scales which pad the last atom must be numbers. Any number of tokens;
features whose output rows are whole 16 bytes, since a TMA store writes no less (seen on an H200). Weights are the A
operand, tokens the B operand (``..common.shape`` says why). Both kinds take 32 bytes of codes of a row an instruction,
so that they differ in types and in how many block scales a stage has.

Warps: one or two teams of four for the epilogue (each warp reads its quarter of tensor memory, the teams alternate at
a tile's chunks), one that issues the MMAs, one for the TMA loads. The roles meet in two rings of mbarriers: operand
stages between TMA and MMA, two accumulator buffers between MMA and epilogue. CTAs are persistent; the epilogue of one
tile runs beside the main loop of the next.

Programmatic dependent launch. A CTA begins while the previous kernel may still run. What it reads before its wait must
be what no kernel in flight writes:

* before the wait, always: parameters, tensor maps among them (they come with the launch); mbarriers and tensor memory,
  which are its own.
* before the wait, but where counts are waited for: codes and block scales of the weights of its first stages. Weights
  are constants.
* before the wait with ``counts_ahead``: the experts' offsets and counts, by which those weights are chosen. The kernel
  that wrote them is at least two launches back, and the one in front waited for its end before it triggered this one
  (PDL), so that they have been there since before this kernel began.
* after the wait: tokens and their block scales (load warp); row scales, row weights, alphas, the workspace, and all
  stores (epilogue warps). The kernel in front makes the first, and kernels before it may read what is overwritten.
* without ``counts_ahead`` experts' kernels read nothing before the wait: counts may be the work of the kernel in front.

The load warp and the epilogue's warps wait, each for itself. The MMA warp need not: the barriers of the tokens' loads
hold it back. The next kernel is let in as soon as a CTA has its tensor memory, by experts' kernels only after their
wait: so the next one may read ahead what kernels before this one wrote.

Numerics: multiplications and sums are the tensor core's (fp32 accumulators); all that follows is fp32 with one rounding
to the output type. The result does not depend on timing. Where K is split over CTAs (split_k) or pairs (stream_k), the
partial sums are added in the order of their slices.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100_utils
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05

from ..common.cache_policy import EVICT_FIRST, EVICT_LAST
from ..common.fragment import EpilogueWarp
from ..common.gemm import Gemm
from ..common.load_warp import load_stages
from ..common.ring import Ring
from ..common.schedule import BatchedSchedule, GroupedSchedule, Place
from ..common.shape import ALIGNMENT, TEAM_WARPS, WARP_LANES
from ..common.split import ClusterReduction
from .epilogue import Epilogue
from .fences import fence_after_wait, fence_before_signal
from .fragment import make_fragment, read_fragment
from .load import OperandLoad, StageLoads
from .shape import LANES, SCALE_ATOM_BYTES, SCALE_ATOM_ROWS, BlockScaledKind, KernelShape
from .stream_k import PartialSums, SharedSlice, StreamKSchedule

K_MAJOR = cute.nvgpu.OperandMajorMode.K


OPERAND_TYPES: dict[BlockScaledKind, tuple[Any, Any]] = {
    "nvfp4": (cutlass.Float4E2M1FN, cutlass.Float8E4M3FN),
    "mxfp8": (cutlass.Float8E4M3FN, cutlass.Float8E8M0FNU),
}
"""Types of codes and of block scales."""


def scale_layout(block: int, rows: Any, k: Any, groups: Any, row_stride: Any, group_stride: Any) -> cute.Layout:
    """Block scales as ((32, 4, row atoms), (block, 4, K atoms), groups) in bytes; strides of atoms and groups given."""
    return cute.make_layout(
        (((32, 4), cute.ceil_div(rows, SCALE_ATOM_ROWS)), ((block, 4), cute.ceil_div(k, 4 * block)), groups),
        stride=(((16, 4), row_stride), ((0, 1), SCALE_ATOM_BYTES), group_stride),
    )


class BlockScaledGemm(Gemm):
    """A kernel of one :class:`KernelShape`; ``..common.entry`` compiles it."""

    shape: KernelShape
    epilogue: Epilogue

    def __init__(self, shape: KernelShape, epilogue: Epilogue) -> None:
        super().__init__(shape, epilogue)
        self.group = tcgen05.CtaGroup.TWO if shape.pair else tcgen05.CtaGroup.ONE
        self.ctas = 2 if shape.pair else 1
        self.sharing = (self.ctas * shape.shared_tokens, shape.shared_weights)
        """CTAs of a cluster that share operands, along features and along tokens."""
        self.code_type, self.scale_type = OPERAND_TYPES[shape.operands]
        self.tiler = (shape.tile_features, shape.token_tile, shape.tile_k)
        self.scale_tiler = (LANES, max(shape.token_tile, SCALE_ATOM_ROWS), shape.tile_k)
        """Tile of the tokens' block scales: whole atoms, and all of them in each CTA of a pair."""

    @property
    def operand_types(self) -> tuple[Any, Any, Any, Any]:
        return self.code_type, self.scale_type, self.code_type, self.scale_type

    # Host side, traced once per compilation.

    def _mma(self, group: Any, tiler: Any) -> cute.TiledMma:
        return sm100_utils.make_blockscaled_trivial_tiled_mma(
            self.code_type, self.code_type, K_MAJOR, K_MAJOR, self.scale_type, self.shape.block, group, tiler[:2]
        )

    def _shared_layouts(self, mma: cute.TiledMma) -> tuple[Any, Any, Any, Any]:
        """Layouts of the staged operands in shared memory: weights, tokens, their block scales.

        They are static, so they can be made anywhere.
        """
        stages, block = self.shape.stages, self.shape.block
        return (
            sm100_utils.make_smem_layout_a(mma, self.tiler, self.code_type, stages),
            sm100_utils.make_smem_layout_b(mma, self.tiler, self.code_type, stages),
            blockscaled.make_smem_layout_sfa(mma, self.tiler, block, stages),
            blockscaled.make_smem_layout_sfb(mma, self.tiler, block, stages),
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

    def launch(self, arguments: Any, stream: Any, use_pdl: bool) -> None:
        """Launch.

        Args:
            arguments: traced ``Arguments``. Weights are codes [groups, features, k], their block scales swizzled, one
                padded matrix after the other; rows of gated kernels as ``shape.py`` says. Tokens are codes, their block
                scales in atoms of 128 rows (of one token tile, if that is smaller) by 4 blocks of K; atoms of the same
                rows adjacent. Offsets and counts are for the grouped schedule alone.
        """
        a = arguments
        shape = self.shape
        mma, scale_mma = self._mma(self.group, self.tiler), self._mma(tcgen05.CtaGroup.ONE, self.scale_tiler)
        ctas = cute.tiled_divide(cute.make_layout((*self.sharing, 1)), (mma.thr_id.shape,))
        scale_ctas = cute.tiled_divide(cute.make_layout((*self.sharing, 1)), (scale_mma.thr_id.shape,))
        a_layout, b_layout, sfa_layout, sfb_layout = self._shared_layouts(mma)
        weights = cute.make_tensor(
            a.weights, cute.make_layout((a.features, a.k, a.groups), stride=(Int64(a.k), 1, Int64(a.features) * a.k))
        )
        tokens = cute.make_tensor(
            a.tokens, cute.make_layout((a.rows, a.k, a.groups), stride=(a.token_row, 1, a.token_group))
        )
        k_atoms = cute.ceil_div(a.k, 4 * shape.block)
        atom_row = Int64(k_atoms) * SCALE_ATOM_BYTES
        weight_scales = cute.make_tensor(
            a.weight_scales,
            scale_layout(
                shape.block, a.features, a.k, a.groups,
                atom_row, atom_row * cute.ceil_div(a.features, SCALE_ATOM_ROWS),
            ),
        )  # fmt: skip
        token_tiles = cute.ceil_div(a.rows, shape.token_tile)
        # A narrow token tile has atoms of its own; the second atom of a wide one may lie beyond the last row.
        scale_rows = token_tiles * SCALE_ATOM_ROWS if shape.token_tile < SCALE_ATOM_ROWS else a.rows
        token_scales = cute.make_tensor(
            a.token_scales, scale_layout(shape.block, scale_rows, a.k, a.groups, a.token_scale_row, a.token_scale_group)
        )

        def one(layout: Any) -> Any:
            return cute.slice_(layout, (None, None, None, 0))

        load_a = sm100_utils.cluster_shape_to_tma_atom_A(self.sharing, mma.thr_id)
        load_b = sm100_utils.cluster_shape_to_tma_atom_B(self.sharing, mma.thr_id)
        load_sfb = sm100_utils.cluster_shape_to_tma_atom_SFB(self.sharing, mma.thr_id)
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        tma_a = make_a(load_a, weights, one(a_layout), self.tiler, mma, ctas.shape)
        tma_b = make_b(load_b, tokens, one(b_layout), self.tiler, mma, ctas.shape)
        tma_sfa = make_a(
            load_a, weight_scales, one(sfa_layout), self.tiler, mma, ctas.shape, internal_type=cutlass.Int16
        )
        tma_sfb = make_b(
            load_sfb, token_scales, one(sfb_layout), self.scale_tiler, scale_mma, scale_ctas.shape,
            internal_type=cutlass.Int16,
        )  # fmt: skip
        feature_tiles = cute.ceil_div(a.features, shape.tile_features)
        outputs = self.epilogue.host(shape, a)
        self.storage = self._storage(a_layout, b_layout, sfa_layout, sfb_layout)
        offsets, counts = (a.offsets, a.counts) if shape.grouped else (None, None)
        workspace = a.workspace if shape.stream_k else None
        kernel = self.kernel(
            mma, scale_mma, *tma_a, *tma_b, *tma_sfa, *tma_sfb, outputs, offsets, counts, workspace,
            feature_tiles, token_tiles, a.groups, cute.ceil_div(a.k, shape.tile_k), ctas, scale_ctas,
        )  # fmt: skip
        self._launch(kernel, self.storage, a.clusters, stream, use_pdl)

    def _storage(self, a_layout: Any, b_layout: Any, sfa_layout: Any, sfb_layout: Any) -> Any:
        shape, codes, scales = self.shape, self.code_type, self.scale_type

        @cute.struct
        class Storage:
            operand_full: cute.struct.MemRange[Int64, shape.stages]
            operand_empty: cute.struct.MemRange[Int64, shape.stages]
            accumulator_full: cute.struct.MemRange[Int64, 2]
            accumulator_empty: cute.struct.MemRange[Int64, 2]
            partials_full: cute.struct.MemRange[Int64, TEAM_WARPS]
            partials_empty: cute.struct.MemRange[Int64, TEAM_WARPS]
            tensor_memory: Int32
            experts: cute.struct.MemRange[Int32, max(shape.expert_words, 1)]
            row_factors: cute.struct.Align[cute.struct.MemRange[Float32, shape.teams * 2 * shape.token_tile], 16]
            partials: cute.struct.Align[cute.struct.MemRange[Float32, max(shape.partial_bytes // 4, 4)], 16]
            transpose: cute.struct.Align[cute.struct.MemRange[Float32, max(shape.transpose_bytes // 4, 4)], 16]
            output: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, max(shape.staging_bytes, 16)], ALIGNMENT]
            a: cute.struct.Align[cute.struct.MemRange[codes, cute.cosize(a_layout.outer)], ALIGNMENT]
            b: cute.struct.Align[cute.struct.MemRange[codes, cute.cosize(b_layout.outer)], ALIGNMENT]
            sfa: cute.struct.Align[cute.struct.MemRange[scales, cute.cosize(sfa_layout)], ALIGNMENT]
            sfb: cute.struct.Align[cute.struct.MemRange[scales, cute.cosize(sfb_layout)], ALIGNMENT]

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
        workspace: Any,
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
        epilogue_warps = TEAM_WARPS * shape.teams
        mma_warp, load_warp = epilogue_warps, epilogue_warps + 1
        rank = self._rank()
        # In a pair, the CTA of even rank issues the MMAs of both.
        peer = rank % 2 if cutlass.const_expr(shape.pair) else Int32(0)
        along_features, along_tokens = Int32(0), Int32(0)
        if cutlass.const_expr(shape.pair):
            along_features, along_tokens = rank % self.sharing[0] // 2, rank // self.sharing[0]
        place = Place(shape.shared_tokens, shape.shared_weights, along_features, along_tokens)
        work = self._work(rank, k_tiles)

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        operands = Ring(storage.operand_full.data_ptr(), storage.operand_empty.data_ptr(), shape.stages)
        buffers = 1 if shape.overlap else 2
        accumulators = Ring(storage.accumulator_full.data_ptr(), storage.accumulator_empty.data_ptr(), buffers)
        own = EpilogueWarp(warp // TEAM_WARPS, warp % TEAM_WARPS, thread % WARP_LANES)
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
            if cutlass.const_expr(shape.waits_first):
                # The previous kernel of the stream may still be running up to here; it wrote the counts, by which even
                # the weights are chosen.
                cute.arch.griddepcontrol_wait()
            schedule = GroupedSchedule(
                place,
                feature_tiles, shape.token_tile, groups,
                cute.make_tensor(offsets, per_expert), cute.make_tensor(counts, per_expert),
                storage.experts.get_tensor(cute.make_layout(shape.expert_words)),
            )  # fmt: skip
            if warp == 0:
                schedule.prepare(thread)
        else:
            schedule = BatchedSchedule(place, feature_tiles, token_tiles, groups)
            if cutlass.const_expr(shape.stream_k):
                work = SharedSlice.of(work, schedule.total())
                schedule = StreamKSchedule(schedule, work)
        self._meet_prepared()
        total = schedule.total()
        # Trigger the next kernel of the stream: its CTAs set up as these exit, then wait for the end. Not before this
        # CTA has its tensor memory: a CTA that waits for this kernel could hold it.
        if cutlass.const_expr(not shape.counts_ahead):
            cute.arch.griddepcontrol_launch_dependents()
        tensor_memory = cute.arch.retrieve_tmem_ptr(Float32, 16, storage.tensor_memory.ptr)

        if warp == load_warp:
            atoms = (atom_a, a), (atom_sfa, sfa), (atom_b, b), (atom_sfb, sfb)
            member = rank if cutlass.const_expr(shape.pair) else Int32(0)
            loads = self._loads(storage, mma, scale_mma, atoms, ctas, scale_ctas, member, peer)
            load_stages(loads, operands, schedule, total, work, not shape.waits_first, shape.cluster > 1)
        if warp == mma_warp:
            self._multiply(storage, operands, accumulators, total, mma, tensor_memory, ctas, rank, peer, work)
        if warp < epilogue_warps:
            if cutlass.const_expr(not shape.waits_first):
                cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(shape.counts_ahead):
                # Only now: the next kernel may read ahead, too, what kernels before this one wrote.
                cute.arch.griddepcontrol_launch_dependents()
            epilogue = self.epilogue.device(shape, storage, outputs, own)
            if cutlass.const_expr(shape.split_k > 1):
                self._reduce(accumulators, schedule, total, epilogue, reduction, tensor_memory, own, work)
            else:
                sums = None
                if cutlass.const_expr(shape.stream_k):
                    # Workspace, too: only after the wait for the previous kernel, which may use the same.
                    sums = PartialSums.of(shape, workspace, schedule.work, peer, own, tensor_memory)
                self._drain(accumulators, schedule, total, epilogue, tensor_memory, own, rank, peer, work, sums)
            epilogue.finish()
        # The epilogue has seen the last accumulator and the load warp all stages free, hence every load and commit has
        # arrived: the CTAs of the cluster may leave, and no warp reads tensor memory any more.
        if cutlass.const_expr(shape.cluster > 1):
            cute.arch.cluster_arrive(aligned=True)
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp == mma_warp:
            cute.arch.dealloc_tmem(tensor_memory, shape.tensor_columns, is_two_cta=shape.pair)

    def _loads(
        self, storage: Any, mma: Any, scale_mma: Any, atoms: Any, ctas: Any, scale_ctas: Any, rank: Any, peer: Any
    ) -> StageLoads:  # fmt: skip
        """The loads of CTA ``rank`` of the cluster, which is number ``peer`` of a pair."""
        (atom_a, a), (atom_sfa, sfa), (atom_b, b), (atom_sfb, sfb) = atoms
        s_a, s_b, s_sfa, s_sfb = self._shared_operands(storage, mma)
        part, scale_part = mma.get_slice(rank % self.ctas), scale_mma.get_slice(0)
        features, tokens, k = self.tiler
        # With few tokens, weights pass through L2 once while every CTA reads the tokens.
        narrow = self.shape.token_tile < LANES
        once, often = (Int64(EVICT_FIRST), Int64(EVICT_LAST)) if narrow else (None, None)
        make = OperandLoad.create
        weights = (
            make(atom_a, part.partition_A, a, (features, k), s_a, ctas, 2, rank, once),
            make(atom_sfa, part.partition_A, sfa, (features, k), s_sfa, ctas, 2, rank, once),
        )
        scale_rows = self.scale_tiler[1]
        staged_tokens = (
            make(atom_b, part.partition_B, b, (tokens, k), s_b, ctas, 1, rank, often),
            make(atom_sfb, scale_part.partition_B, sfb, (scale_rows, k), s_sfb, scale_ctas, 1, rank, often),
        )
        return StageLoads(weights, staged_tokens, peer, self.shape.stage_bytes * self.ctas)

    @cute.jit
    def _multiply(self, storage, operands, accumulators, total, mma, tensor_memory, ctas, rank, peer, work):
        """The MMA warp: block scales to tensor memory, then four MMAs per stage."""
        shape, k_tiles = self.shape, work.k_end - work.k_begin
        s_a, s_b, s_sfa, s_sfb = self._shared_operands(storage, mma)
        r_a, r_b = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
        accumulator_layout = mma.make_fragment_C(mma.partition_shape_C(self.tiler[:2])).layout

        def one(layout: Any) -> Any:
            return cute.slice_(layout, (None, None, None, 0))

        def scales(column: int, layout: Any) -> Any:
            return cute.make_tensor(cute.recast_ptr(tensor_memory + column, dtype=self.scale_type), layout)

        sfa_layout = blockscaled.make_tmem_layout_sfa(mma, self.tiler, shape.block, one(s_sfa.layout))
        sfb_layout = blockscaled.make_tmem_layout_sfb(mma, self.tiler, shape.block, one(s_sfb.layout))
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
            tile = work.first
            while tile < total:
                accumulators.wait_empty(accumulator)
                fence_after_wait()
                target = cute.make_tensor(tensor_memory + buffer * shape.second_accumulator, accumulator_layout)
                mma.set(tcgen05.Field.ACCUMULATE, False)
                stages = k_tiles
                if cutlass.const_expr(shape.stream_k):
                    begin, end = work.slice_of(tile)
                    stages = end - begin
                for _ in cutlass.range(stages, unroll=1):
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
                tile += work.step

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
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), self.scale_type)
        copy = tcgen05.make_s2t_copy(atom, target)
        part = copy.get_slice(0)
        source = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(shared))
        return copy, source, part.partition_D(target)

    @cute.jit
    def _drain(self, accumulators, schedule, total, epilogue, tensor_memory, warp, rank, peer, work, sums):
        """An epilogue warp: accumulators to factors, activation, rounding, global memory."""
        shape = self.shape
        position = accumulators.consumer()
        buffer = Int32(0)
        tile = work.first
        if cutlass.const_expr(shape.stream_k):  # noqa: SIM102  the compiler takes them one by one
            if tile < 0:
                self._share(accumulators, position, schedule, epilogue, tensor_memory, warp, rank, peer, sums)
                position.advance()
                buffer = buffer ^ 1
                tile += work.step
        following, fetched = self._fetch(schedule, epilogue, total, tile, peer)
        while tile < total:
            where = following
            alphas = epilogue.begin(fetched)
            following, fetched = self._fetch(schedule, epilogue, total, tile + work.step, peer)
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
            tile += work.step

    @cute.jit
    def _share(self, accumulators, position, schedule, epilogue, tensor_memory, warp, rank, peer, sums):
        """An epilogue warp's part of a shared tile, which is the first: give sums away, finish the units it owns.

        The accumulator is buffer 0. The columns that it has in common with the other buffer hold each team's first
        chunk, which is always given away; all others stay where they are during the next tile's main loop.
        """
        shape = self.shape
        where, fetched = self._fetch(schedule, epilogue, Int32(0), Int32(-1), peer)
        alphas = epilogue.begin(fetched)
        accumulators.wait_full(position)
        fence_after_wait()
        values = make_fragment(shape.chunk)
        for turn in cutlass.range(shape.chunks // shape.teams, unroll=1):
            chunk = self._chunk_of(turn * shape.teams + warp.team, Int32(0))
            read_fragment(tensor_memory, chunk * shape.chunk, warp, values)
            cute.arch.fence_view_async_tmem_load()
            if turn == 0:
                self._release(accumulators, position, rank - peer)
            if turn == 0 or not sums.owns(chunk):
                sums.put(values, chunk)
        sums.signal()
        sums.wait()
        slot = Int32(0)
        for turn in cutlass.range(shape.chunks // shape.teams, unroll=1):
            chunk = self._chunk_of(turn * shape.teams + warp.team, Int32(0))
            if sums.owns(chunk):
                sums.add(values, chunk, turn > 0)
                factors = epilogue.factors(chunk)
                epilogue.chunk(values, factors, alphas, slot % shape.warp_buffers, chunk, *where)
                slot += 1
        sums.leave()
        # An odd number of stores may have left the first buffer in use, with which the next tile begins.
        epilogue.finish()

    @cute.jit
    def _fetch(self, schedule, epilogue, total, tile, peer):
        """The place of an epilogue warp's tile, and its factors under way; beyond the last tile any that exists."""
        known = cutlass.select_(tile < total, tile, Int32(0))
        feature_tile, token_tile, weight_group, token_group, inside = schedule.locate(known)
        if cutlass.const_expr(self.shape.pair):
            feature_tile = feature_tile * 2 + peer
        fetched = epilogue.fetch(feature_tile, token_tile, weight_group, token_group)
        return (feature_tile, token_tile, token_group, inside), fetched

    @cute.jit
    def _release(self, accumulators, position, leader):
        """Release the accumulator buffer to the tensor core: its values are in registers."""
        fence_before_signal()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if cutlass.const_expr(self.shape.pair):
                cute.arch.mbarrier_arrive(accumulators.empty + position.index, leader)
            else:
                cute.arch.mbarrier_arrive(accumulators.empty + position.index)

    @cute.jit
    def _reduce(self, accumulators, schedule, total, epilogue, reduction, tensor_memory, warp, work):
        """An epilogue warp of a split-K cluster: exchange sums with the other CTAs, finish what this one owns."""
        shape = self.shape
        position = accumulators.consumer()
        buffer, phase = Int32(0), Int32(0)
        tile = work.first
        following, fetched = self._fetch(schedule, epilogue, total, tile, Int32(0))
        while tile < total:
            where = following
            alphas = epilogue.begin(fetched)
            following, fetched = self._fetch(schedule, epilogue, total, tile + work.step, Int32(0))
            accumulators.wait_full(position)
            fence_after_wait()
            values = make_fragment(shape.chunk)
            column = buffer * shape.second_accumulator
            reduction.expect()
            if tile != work.first:
                reduction.wait_empty(phase ^ 1)
            for chunk in cutlass.range(shape.chunks, unroll=1):
                read_fragment(tensor_memory, column + chunk * shape.chunk, warp, values)
                cute.arch.fence_view_async_tmem_load()
                if reduction.owner(chunk) != reduction.rank:
                    reduction.send(values, chunk)
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
            tile += work.step
            if tile < total:
                reduction.signal_empty()
            position.advance()
            buffer = buffer ^ 1
            phase = phase ^ 1

    def _chunk_of(self, turn: Any, buffer: Any) -> Any:
        """The chunk to work on: the columns shared with the other accumulator buffer come first."""
        if not self.shape.overlap:
            return turn
        return cutlass.select_(buffer == 0, Int32(self.shape.chunks - 1 - turn), Int32(turn))
