"""A kernel that writes tensor memory in one shape and reads it back in another, both partitioned by CuTeDSL."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from tests.sm100.emulator import Compiled, compile_for

ROWS = 128
LANE_STRIDE = 1 << 16


class RoundTrip:
    """source → registers → tensor memory → registers → target, element (m, n) in lane m, column n."""

    def __init__(self, store: object, load: object, columns: int) -> None:
        self.store, self.load, self.columns = store, load, columns

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor, stream: object) -> None:
        self.kernel(source, target).launch(grid=(1, 1, 1), block=(ROWS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, source: cute.Tensor, target: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        holder = cutlass.utils.SmemAllocator().allocate_array(cutlass.Int32)
        if warp == 0:
            cute.arch.alloc_tmem(self.columns, holder)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.barrier()
        begin = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)
        cells = cute.make_tensor(begin, cute.make_layout((ROWS, self.columns), stride=(LANE_STRIDE, 1)))
        writer = tcgen05.make_tmem_copy(cute.make_copy_atom(self.store, cutlass.Float32), cells).get_slice(thread)
        from_source = writer.partition_S(source)
        into = writer.partition_D(cells)
        values = cute.make_rmem_tensor(from_source.shape, cutlass.Float32)
        cute.autovec_copy(from_source, values)
        cute.copy(writer, values, into)
        cute.arch.fence_view_async_tmem_store()
        cute.arch.barrier()
        reader = tcgen05.make_tmem_copy(cute.make_copy_atom(self.load, cutlass.Float32), cells).get_slice(thread)
        to_target = reader.partition_D(target)
        found = cute.make_rmem_tensor(to_target.shape, cutlass.Float32)
        cute.copy(reader, reader.partition_S(cells), found)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(found, to_target)
        cute.arch.barrier()
        if warp == 0:
            cute.arch.dealloc_tmem(begin, self.columns)


@functools.cache
def compiled_round_trip(store: str, load: str, repetition: int, columns: int) -> Compiled:
    """Shapes by name, e.g. ``16x64b``; one repetition for both, capped by what each shape allows."""
    largest = {"16x128b": 64, "16x256b": 32}
    times = [min(repetition, largest.get(name, 128)) for name in (store, load)]
    repeat = [tcgen05.Repetition(number) for number in times]
    operations = getattr(tcgen05, f"St{store}Op")(repeat[0]), getattr(tcgen05, f"Ld{load}Op")(repeat[1])
    tensor = make_fake_compact_tensor(cutlass.Float32, (ROWS, columns), stride_order=(1, 0), assumed_align=16)
    return compile_for("sm_100a", RoundTrip(*operations, columns), tensor, tensor, make_fake_stream())
