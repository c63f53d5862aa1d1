"""A GEMM of one output tile in half precision: CuTeDSL's layouts decide where operands and accumulator lie."""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from tests.sm100.emulator import Compiled, compile_for

THREADS = 128
INSTRUCTION_DEPTH = 16


def on_stream(stream: object) -> dict[str, object]:
    """A launch's argument; none for the default stream."""
    return {} if stream is None else {"stream": stream}


class OneTileGemm:
    """c = a bᵀ for the shape of one instruction, several instructions deep.

    Attributes:
        dtype: of the operands.
        shape: M, N, K; M and N are those of the instruction.
        ctas: 1, or 2 for a pair.
        swizzles: shared-memory layout atom of a and of b, e.g. ``K_SW128`` or ``MN_SW64``.
        load: name and repetition of the atom that reads the accumulator.
    """

    def __init__(
        self, dtype: Any, shape: tuple[int, int, int], ctas: int, swizzles: tuple[str, str], load: tuple[str, int]
    ) -> None:
        self.dtype, self.shape, self.ctas, self.swizzles = dtype, shape, ctas, swizzles
        self.load = load
        self.group = tcgen05.CtaGroup.ONE if ctas == 1 else tcgen05.CtaGroup.TWO

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: object) -> None:
        self.launch(a, b, c, stream)

    @cute.jit
    def launch(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, stream: object) -> None:
        """``stream`` may be ``None``, the default one."""
        majors = [OperandMajorMode.K if name[0] == "K" else OperandMajorMode.MN for name in self.swizzles]
        shape = (*self.shape[:2], INSTRUCTION_DEPTH)
        smem = tcgen05.OperandSource.SMEM
        operation = tcgen05.MmaF16BF16Op(self.dtype, cutlass.Float32, shape, self.group, smem, *majors)
        mma = cute.make_tiled_mma(operation)
        kinds = [getattr(tcgen05.SmemLayoutAtomKind, name) for name in self.swizzles]
        m, n, k = self.shape
        layouts = [
            tcgen05.tile_to_mma_shape(
                tcgen05.make_smem_layout_atom(kind, self.dtype),
                part,
                order=(1, 2) if major == OperandMajorMode.K else (2, 1),
            )
            for kind, part, major in zip(
                kinds, (mma.partition_shape_A((m, k)), mma.partition_shape_B((n, k))), majors, strict=True
            )
        ]
        self.kernel(mma, a, b, c, *layouts).launch(
            grid=(self.ctas, 1, 1), block=(THREADS, 1, 1), cluster=(self.ctas, 1, 1), **on_stream(stream)
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ) -> None:
        m, n, k = self.shape
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        allocator = cutlass.utils.SmemAllocator()
        barrier = allocator.allocate_array(cutlass.Int64)
        holder = allocator.allocate_array(cutlass.Int32)
        a_tile = allocator.allocate_tensor(self.dtype, a_layout.outer, 1024, a_layout.inner)
        b_tile = allocator.allocate_tensor(self.dtype, b_layout.outer, 1024, b_layout.inner)
        if warp == 0:
            cute.arch.alloc_tmem(256, holder, is_two_cta=self.ctas == 2)
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas == 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()

        part = mma.get_slice(rank)
        for source, tile in ((part.partition_A(a), a_tile), (part.partition_B(b), b_tile)):
            for i in range(thread, cute.size(tile), THREADS):
                tile[i] = source[i]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        cute.arch.barrier()

        begin = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)
        accumulator = cute.make_tensor(begin, mma.make_fragment_C(mma.partition_shape_C((m, n))).layout)
        left, right = mma.make_fragment_A(a_tile), mma.make_fragment_B(b_tile)
        if warp == 0 and rank == 0:
            for block in cutlass.range_constexpr(k // INSTRUCTION_DEPTH):
                mma.set(tcgen05.Field.ACCUMULATE, block != 0)
                cute.gemm(mma, accumulator, left[None, None, block], right[None, None, block], accumulator)
            with cute.arch.elect_one():
                if cutlass.const_expr(self.ctas == 2):
                    tcgen05.commit(barrier, 3, self.group)
                else:
                    tcgen05.commit(barrier, None, self.group)
        cute.arch.mbarrier_wait(barrier, 0)

        name, repetition = self.load
        atom = cute.make_copy_atom(getattr(tcgen05, f"Ld{name}Op")(tcgen05.Repetition(repetition)), cutlass.Float32)
        cells = accumulator[(None, None), 0, 0]
        reader = tcgen05.make_tmem_copy(atom, cells).get_slice(thread)
        target = reader.partition_D(part.partition_C(c)[(None, None), 0, 0])
        found = cute.make_rmem_tensor(target.shape, cutlass.Float32)
        cute.copy(reader, reader.partition_S(cells), found)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(found, target)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if warp == 0:
            cute.arch.dealloc_tmem(begin, 256, is_two_cta=self.ctas == 2)


@functools.cache
def compiled_one_tile(
    dtype: str, shape: tuple[int, int, int], ctas: int, swizzles: tuple[str, str], load: tuple[str, int]
) -> Compiled:
    """The kernel for row-major a [M, K], b [N, K] of ``Float16`` or ``BFloat16`` and fp32 c [M, N]."""
    kind = getattr(cutlass, dtype)
    m, n, k = shape
    fakes = [
        make_fake_compact_tensor(element, extents, stride_order=(1, 0), assumed_align=16)
        for element, extents in ((kind, (m, k)), (kind, (n, k)), (cutlass.Float32, (m, n)))
    ]
    return compile_for("sm_100a", OneTileGemm(kind, shape, ctas, swizzles, load), *fakes, make_fake_stream())
