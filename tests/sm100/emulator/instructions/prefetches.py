"""Bulk prefetches into L2: no value changes, but what they name must be there.

Source: PTX ISA, ``cp.async.bulk.prefetch.L2``, ``cp.async.bulk.prefetch.tensor``.
"""

from __future__ import annotations

from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import MemoryFaultError
from tests.sm100.emulator.instructions.copies import begin_with_map, tensor_operands
from tests.sm100.emulator.warp import Mask, Warp, active

GRANULE = 16


def _touch(warp: Warp, address: int, nbytes: int) -> None:
    """Bytes that come to L2: the kernel may read them, but nothing that may change is read."""
    warp.cta.launch.memory.find(address, nbytes, write=False)
    warp.cta.launch.statistics.engine_bytes["prefetch"] += nbytes


@instruction("cp.async.bulk.prefetch.L2")
def build_prefetch(decoder: Decoder) -> Execute:
    decoder.expect("global")
    decoder.arity(3 if decoder.flag("L2::cache_hint") else 2)
    address, size = decoder.address(0), decoder.read(1, "u32")

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            where, nbytes = int(address(warp)[lane]), int(size(warp)[lane])
            if where % GRANULE or nbytes % GRANULE:
                raise MemoryFaultError(f"bulk prefetch of {nbytes} B at {where:#x}: expected multiples of {GRANULE}")
            _touch(warp, where, nbytes)

    return execute


@instruction("cp.async.bulk.prefetch.tensor")
def build_tensor_prefetch(decoder: Decoder) -> Execute:
    decoder.expect("L2", "global")
    decoder.one_of("tile", default="")
    decoder.arity(2 if decoder.flag("L2::cache_hint") else 1)
    map_address, coordinates = tensor_operands(decoder, 0)

    def execute(warp: Warp, mask: Mask) -> None:
        for lane in active(mask):
            where = int(map_address(warp)[lane])
            box = begin_with_map(warp, where)
            warp.cta.launch.map_order.end(where)
            for row in box.rows(tuple(int(read(warp)[lane]) for read in coordinates)):
                _touch(warp, row.address, row.size)

    return execute
