"""Tensor maps changed on the device: tensormap.replace, tensormap.cp_fenceproxy, fences of the tensormap proxy."""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import HazardError, MemoryFaultError, UnsupportedError
from tests.sm100.emulator.instructions.load_store import agent, load, store
from tests.sm100.emulator.tensor_map import FIELD_BYTES, replace_field
from tests.sm100.emulator.tensor_map_order import MAP_ALIGNMENT, MAP_BYTES
from tests.sm100.emulator.warp import Mask, Warp, active

STEPS = range(0, FIELD_BYTES, 16)
"""Offsets of the pieces that are moved at a time."""


def read_map(warp: Warp, space: str, address: int) -> bytes:
    """The fields of a map; ``space`` as in load()."""
    if address % MAP_ALIGNMENT:
        raise MemoryFaultError(f"tensor map at {address:#x}: expected a multiple of {MAP_ALIGNMENT}")
    return b"".join(load(warp, space, address + step, STEPS.step).tobytes() for step in STEPS)


def write_map(warp: Warp, space: str, address: int, raw: bytes) -> None:
    """Store the fields of a map."""
    for step in STEPS:
        store(warp, space, address + step, np.frombuffer(raw[step : step + STEPS.step], np.uint8))


@instruction("tensormap.replace")
def build_replace(decoder: Decoder) -> Execute:
    """One field of a map in shared or global memory."""
    decoder.expect("tile", "b1024")
    space = decoder.one_of("shared::cta", "global", default="")
    name = decoder.one_of("global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride")
    wide = name in ("global_address", "global_stride")
    decoder.expect("b64" if wide else "b32")
    indexed = name not in ("global_address", "rank")
    decoder.arity(3 if indexed else 2)
    position = decoder.literal(1) if indexed else 0
    address = decoder.address(0)
    value = decoder.read(2 if indexed else 1, "u64" if wide else "u32")

    def execute(warp: Warp, mask: Mask) -> None:
        addresses, values = address(warp), value(warp)
        for lane in active(mask):
            where = int(addresses[lane])
            raw = replace_field(read_map(warp, space, where), name, position, int(values[lane]))
            write_map(warp, space, where, raw)

    return execute


@instruction("tensormap.cp_fenceproxy")
def build_copy(decoder: Decoder) -> Execute:
    """A whole warp copies a map from shared to global memory and releases it.

    Only the bytes known to hold fields are copied: CuTeDSL leaves the others of the shared copy unwritten.
    """
    decoder.expect("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned")
    decoder.one_of("cta", "cluster", "gpu", "sys")
    decoder.arity(3)
    if decoder.literal(2) != MAP_BYTES:
        raise UnsupportedError(f"a copy of {decoder.literal(2)} B")
    target, source = decoder.address(0), decoder.address(1)

    def execute(warp: Warp, mask: Mask) -> None:
        if mask is not None:
            raise HazardError("tensormap.cp_fenceproxy by part of a warp")
        where = int(target(warp)[0])
        if where % MAP_BYTES:
            raise MemoryFaultError(f"tensormap.cp_fenceproxy to {where:#x}: expected a multiple of {MAP_BYTES}")
        warp.cta.launch.memory.view(where, MAP_BYTES, write=True)  # all of it must be there
        write_map(warp, "global", where, read_map(warp, "shared::cta", int(source(warp)[0])))
        warp.cta.launch.map_order.release(agent(warp))

    return execute


@instruction("fence.proxy.tensormap::generic")
def build_fence(decoder: Decoder) -> Execute:
    acquires = decoder.one_of("acquire", "release") == "acquire"
    decoder.one_of("cta", "cluster", "gpu", "sys")
    decoder.arity(2 if acquires else 0)
    if acquires and decoder.literal(1) != MAP_BYTES:
        raise UnsupportedError(f"an acquire of {decoder.literal(1)} B")
    address = decoder.address(0) if acquires else None

    def execute(warp: Warp, mask: Mask) -> None:
        order = warp.cta.launch.map_order
        if address is None:
            order.release(agent(warp))
            return
        for where in {int(address(warp)[lane]) for lane in active(mask)}:
            order.acquire(warp.cta.index, where)

    return execute
