"""GEMMs of NVFP4 or FP8 weights with bf16 tokens on Hopper's tensor cores; weights are expanded in registers.

Computes, for each group g, token row t and feature f::

    acc       = sum over k of tokens[t, k] * (code * scale)(weights[g, f, k])       fp32
    out[t, f] = epilogue(acc)                                                       see epilogue.py

Groups are a batch of equal GEMMs, or experts, whose rows device-side offsets and counts give. A gated kernel joins a
gate and an up to one output.

Operands: weights in the tiles of layout.py or fp8_layout.py; bf16 tokens, K contiguous. K a multiple of 64; any number
of tokens; features whose output rows are whole 16 bytes, since a TMA store writes no less (seen on an H200).

Warps: two warpgroups that expand, multiply and store, 64 of a tile's 128 rows each, and one warp for loads. They share
a ring of stages of 128 of K: a tile of weights by one copy, the tokens by TMA, or by cp.async from the rows of an
unsorted matrix (load.py). Up to 16 tokens, or 8 of an expert, every warp multiplies by itself (warp_sums.py), with more
a warpgroup does (warpgroup_sums.py). CTAs are persistent.

Programmatic dependent launch: each CTA sets up and issues the weight loads of its first stages before the previous
kernel has ended; it reads tokens and writes outputs after that. With experts the counts say whose weights are needed:
all CTAs wait before they read them, unless the shape says that an earlier kernel wrote them (``counts_ahead``). The
next kernel may begin once every CTA has issued the loads of its last tile, or has received it, where tokens are
gathered.

Numerics: expanded weights are exact in bf16; sums are the tensor core's, in fp32, in the order of K. With tiles of 8
tokens even and odd steps of 16 have separate sums, which are then added; with split_k the partial sums of slices of K
are added in their order. The result does not depend on timing.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum

from ..common.cache_policy import EVICT_LAST
from ..common.fragment import EpilogueWarp
from ..common.gemm import Gemm
from ..common.load_warp import load_stages
from ..common.ring import Ring
from ..common.schedule import BatchedSchedule, GroupedSchedule, Place
from ..common.shape import ALIGNMENT, MAX_SPLIT_TILE, TEAM_WARPS, WARP_LANES
from ..common.split import ClusterReduction
from .epilogue import Epilogue
from .layout import TILE_K, TILE_ROWS
from .load import GatheredLoads, StageLoads, TrimmedLoads, trimmed_width
from .shape import CONSUMER_REGISTERS, CONSUMER_WARPS, LOADER_REGISTERS, WARPGROUP_ROWS, KernelShape
from .warp_sums import WarpSums
from .warpgroup_sums import WarpgroupSums
from .weights import WeightLoad, tile_box, tile_layout

K_MAJOR = cute.nvgpu.OperandMajorMode.K


class W4A16Gemm(Gemm):
    """A kernel of one :class:`KernelShape`; ``..common.entry`` compiles it."""

    operand_types = cutlass.Uint8, cutlass.Uint8, BFloat16, cutlass.Uint8

    shape: KernelShape
    epilogue: Epilogue

    def __init__(self, shape: KernelShape, epilogue: Epilogue) -> None:
        if shape.gated != (epilogue.limit is not None):
            raise ValueError(f"limit: expected one for gated kernels only, found {epilogue.limit} for {shape}")
        super().__init__(shape, epilogue)

    # Host side, traced once per compilation.

    def _mmas(self) -> tuple[cute.TiledMma, ...]:
        """The MMA of one warpgroup for each width; both do the same to rows of their own."""
        return tuple(
            sm90_utils.make_trivial_tiled_mma(
                BFloat16, BFloat16, K_MAJOR, K_MAJOR, Float32, (1, 1, 1), (WARPGROUP_ROWS, width),
                warpgroup.OperandSource.RMEM,
            )
            for width in self.shape.widths
        )  # fmt: skip

    def _token_layout(self) -> Any:
        """Layout of the staged tokens in shared memory."""
        tiler = (TILE_ROWS, self.shape.token_tile, TILE_K)
        return sm90_utils.make_smem_layout_b(LayoutEnum.ROW_MAJOR, tiler, BFloat16, self.shape.stages)

    def _load_layout(self, layout: Any) -> Any:
        """Layout of a load's tokens in shared memory."""
        box = cute.composition(layout.outer, (self.shape.load_tokens, TILE_K, 1))
        return cute.make_composed_layout(layout.inner, 0, cute.slice_(box, (None, None, 0)))

    def launch(self, arguments: Any, stream: Any, use_pdl: bool) -> None:
        """Launch.

        Args:
            arguments: traced ``Arguments``. Weights are tiles, uint8 [groups, ceil(features / 128), ceil(k / 128),
                shape.tile_bytes]; tokens are bf16. Scales of rows and of operands are not used.
        """
        a = arguments
        shape = self.shape
        layout = self._token_layout()
        # Experts' rows lie in one matrix.
        batch = Int32(1) if shape.grouped else a.groups
        source = cute.make_tensor(
            a.tokens, cute.make_layout((a.rows, a.k, batch), stride=(a.token_row, 1, a.token_group))
        )
        tma_tokens: Any = (None, source)
        if not shape.gathers:
            tma_tokens = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), source, self._load_layout(layout), (shape.load_tokens, TILE_K)
            )
        rows, words = tile_box(shape.tile_bytes)
        feature_tiles, k_tiles = cute.ceil_div(a.features, TILE_ROWS), cute.ceil_div(a.k, TILE_K)
        packed = cute.make_tensor(
            cute.recast_ptr(a.weights, dtype=Uint32), tile_layout(shape.tile_bytes, a.groups * feature_tiles * k_tiles)
        )
        tma_weights = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), packed, cute.make_layout((rows, words), stride=(words, 1)), (rows, words)
        )
        outputs = self.epilogue.host(shape, a, batch)
        self.storage = self._storage(layout)
        offsets, counts = (a.offsets, a.counts) if shape.grouped else (None, None)
        sources = cute.make_tensor(a.sources, cute.make_layout(a.rows)) if shape.gathers else None
        kernel = self.kernel(
            self._mmas(), *tma_weights, *tma_tokens, outputs, offsets, counts, sources, feature_tiles,
            cute.ceil_div(a.rows, shape.token_tile), a.groups, k_tiles,
        )  # fmt: skip
        self._launch(kernel, self.storage, a.clusters, stream, use_pdl)

    def _storage(self, layout: Any) -> Any:
        shape = self.shape

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, shape.stages]
            empty: cute.struct.MemRange[Int64, shape.stages]
            partials_full: cute.struct.MemRange[Int64, CONSUMER_WARPS]
            partials_empty: cute.struct.MemRange[Int64, CONSUMER_WARPS]
            experts: cute.struct.MemRange[Int32, max(shape.expert_words, 1)]
            partials: cute.struct.Align[cute.struct.MemRange[Float32, max(shape.partial_bytes // 4, 4)], 16]
            output: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, shape.staging_bytes], ALIGNMENT]
            tokens: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layout.outer)], ALIGNMENT]
            weights: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, shape.stages * shape.tile_bytes], 128]

        return Storage

    # Device side.

    @cute.kernel
    def kernel(
        self,
        mmas: tuple[cute.TiledMma, ...],
        weight_atom: cute.CopyAtom,
        weights: cute.Tensor,
        atom: Any,
        tokens: cute.Tensor,
        outputs: Any,
        offsets: Any,
        counts: Any,
        sources: Any,
        feature_tiles: Int32,
        token_tiles: Int32,
        groups: Int32,
        k_tiles: Int32,
    ):
        shape = self.shape
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        load_warp = CONSUMER_WARPS
        rank = self._rank()
        work = self._work(rank, k_tiles)

        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        ring = Ring(storage.full.data_ptr(), storage.empty.data_ptr(), shape.stages)
        own = EpilogueWarp(warp // TEAM_WARPS, warp % TEAM_WARPS, thread % WARP_LANES)
        exchange = storage.partials.data_ptr(), storage.partials_full.data_ptr(), storage.partials_empty.data_ptr()
        reduction = ClusterReduction(shape, rank, *exchange, own.index, own.lane)
        if warp == load_warp:
            cpasync.prefetch_descriptor(weight_atom)
            if cutlass.const_expr(not shape.gathers):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                # Each lane's copies of gathered rows arrive at the barrier.
                ring.initialise(1 + WARP_LANES if shape.gathers else 1, CONSUMER_WARPS)
                if cutlass.const_expr(shape.split_k > 1):
                    reduction.initialise()
                cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(shape.gathers):
            self._clear(storage.tokens.data_ptr(), thread)
        schedule: Any
        place = Place(1, 1, Int32(0), Int32(0))
        if cutlass.const_expr(shape.grouped):
            per_expert = cute.make_layout(groups)
            if cutlass.const_expr(shape.waits_first):
                # The previous kernel of the stream may still be running up to here; it wrote the counts, by which even
                # the weights are chosen.
                cute.arch.griddepcontrol_wait()
            schedule = GroupedSchedule(
                place, feature_tiles, shape.token_tile, groups,
                cute.make_tensor(offsets, per_expert), cute.make_tensor(counts, per_expert),
                storage.experts.get_tensor(cute.make_layout(shape.expert_words)), shape.keeps_offsets,
            )  # fmt: skip
            if warp == 0:
                schedule.prepare(thread)
        else:
            schedule = BatchedSchedule(place, feature_tiles, token_tiles, groups)
        self._meet_prepared()
        total = schedule.total()

        if warp < CONSUMER_WARPS:
            if cutlass.const_expr(shape.reallocates):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            epilogue = self.epilogue.device(shape, storage, outputs, own)
            self._multiply(storage, mmas, ring, schedule, total, epilogue, reduction, own, work)
            epilogue.finish()
        else:
            if cutlass.const_expr(shape.reallocates):
                cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp == load_warp:
                # Kernels for few tokens mostly read a tile of weights once, but tokens by every CTA.
                once = shape.token_tile <= MAX_SPLIT_TILE
                load = WeightLoad.create(
                    weight_atom, weights, storage.weights.data_ptr(), shape.tile_bytes, shape.stages, feature_tiles,
                    k_tiles, once,
                )  # fmt: skip
                policy = Int64(EVICT_LAST) if once else None
                loads: Any
                if cutlass.const_expr(shape.gathers):
                    loads = GatheredLoads(
                        shape, load, storage.tokens.data_ptr().toint(), tokens.iterator.toint(),
                        Int64(tokens.stride[0]) * 2, tokens.shape[1], sources, own.lane,
                    )  # fmt: skip
                elif cutlass.const_expr(shape.trims_loads):
                    loads = TrimmedLoads.create(shape, load, schedule, atom, tokens, self._tokens(storage))
                else:
                    loads = StageLoads.create(shape, load, atom, tokens, self._tokens(storage), policy)
                load_stages(loads, ring, schedule, total, work, shape.weights_ahead)
                # Trigger the next kernel of the stream: its CTAs set up as these exit, then wait for the end.
                # Triggering before the first loads instead is no faster (launch/results/hopper_step_h200.md).
                cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _clear(self, tokens, thread):
        """Zero the stages' tokens: rows that hold none are multiplied, too."""
        first = Uint32(tokens.toint())
        vectors = self.shape.stages * self.shape.token_bytes // 16
        for vector in cutlass.range(thread, vectors, self.shape.threads, unroll=1):
            cute.arch.inline_ptx(
                "{ .reg .b32 zero; mov.b32 zero, 0; st.shared.v4.b32 [{$r0}], {zero, zero, zero, zero}; }",
                read_only_args=[first + Uint32(vector * 16)],
            )

    def _tokens(self, storage: Any) -> cute.Tensor:
        """Staged: (token, k, stage)."""
        layout = self._token_layout()
        return storage.tokens.get_tensor(layout.outer, swizzle=layout.inner)

    @cute.jit
    def _multiply(self, storage, mmas, ring, schedule, total, epilogue, reduction, warp, work):
        """A warp that multiplies."""
        shape = self.shape
        weights = storage.weights.data_ptr()
        products: Any
        if cutlass.const_expr(shape.multiplies_by_warp):
            products = WarpSums(shape, ring, weights, storage.tokens.data_ptr().toint(), warp)
        else:
            products = WarpgroupSums(shape, ring, weights, self._tokens(storage), warp, mmas)
        if cutlass.const_expr(not shape.waits_first):
            # The epilogue writes what earlier kernels may read, and everything here comes after the first tokens.
            cute.arch.griddepcontrol_wait()
        position = ring.consumer()
        phase = Int32(0)
        tile = work.first
        while tile < total:
            feature_tile, token_tile, weight_group, token_group, inside = schedule.locate(tile)
            factors = epilogue.factors(feature_tile, weight_group)
            where = feature_tile, token_tile, token_group, inside
            if cutlass.const_expr(shape.split_k > 1):
                values = cute.make_rmem_tensor((shape.token_tile // 2,), Float32)
                position = products.add_up(values, position, work.k_begin, work.k_end, shape.token_tile)
                self._reduce(
                    values, epilogue, reduction, factors, where, phase, tile != work.first, tile + work.step < total
                )
            elif cutlass.const_expr(shape.trims):
                rows = trimmed_width(shape, schedule.rows(token_tile, weight_group))
                for i in cutlass.range_constexpr(len(shape.widths)):
                    width = shape.widths[i]
                    if rows == width:
                        position = self._finish_tile(products, position, work, epilogue, factors, where, width)
            else:
                position = self._finish_tile(products, position, work, epilogue, factors, where, shape.token_tile)
            phase = phase ^ 1
            tile += work.step

    @cute.jit
    def _finish_tile(self, products, position, work, epilogue, factors, where, width: cutlass.Constexpr[int]):
        """Sum up and store the first ``width`` tokens of a tile; returns the ring's position behind it.

        Each width has sums of its own: ptxas serialises all wgmmas whose registers several loops share.
        """
        shape = self.shape
        # Whole chunks are stored.
        values = cute.make_rmem_tensor((max(width, shape.chunk) // 2,), Float32)
        if cutlass.const_expr(shape.trims):
            # The first MMA sets them, but the compiler does not know, and would keep each width's from tile to tile.
            values.fill(0.0)
        position = products.add_up(values, position, work.k_begin, work.k_end, width)
        for chunk in cutlass.range_constexpr(shape.chunks):
            if cutlass.const_expr(chunk * shape.chunk < width):
                slot = chunk % shape.warp_buffers
                epilogue.chunk(self._chunk(values, chunk), factors, Int32(slot), Int32(chunk), *where)
            else:
                epilogue.skip()
        return position

    def _chunk(self, values: cute.Tensor, chunk: int) -> cute.Tensor:
        """This thread's values of a chunk of tokens: they are in the order of tokens."""
        count = self.shape.chunk_values
        return cute.make_tensor(values.iterator + chunk * count, cute.make_layout(count))

    @cute.jit
    def _reduce(self, values, epilogue, reduction, factors, where, phase, is_later, is_followed):
        """Exchange sums with the other CTAs of the cluster, finish what this one owns."""
        shape = self.shape
        reduction.expect()
        if is_later:
            reduction.wait_empty(phase ^ 1)
        for chunk in cutlass.range_constexpr(shape.chunks):
            if reduction.owner(chunk) != reduction.rank:
                reduction.send(self._chunk(values, chunk), chunk)
        reduction.wait_full(phase)
        for chunk in cutlass.range_constexpr(shape.chunks):
            if reduction.owner(chunk) == reduction.rank:
                part = self._chunk(values, chunk)
                reduction.add(part, chunk)
                epilogue.chunk(part, factors, Int32(0), Int32(chunk), *where)
        if is_followed:
            reduction.signal_empty()
