"""ld, st, atom, red on the parameter block, global and shared memory.

Lanes are served in lane order. Each access must be aligned to its size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction, matrix
from tests.sm100.emulator.errors import MemoryFaultError, UnsupportedError
from tests.sm100.emulator.memory import PARAMETER_WINDOW, SHARED_WINDOW
from tests.sm100.emulator.scalar_types import LANES, dtype_of
from tests.sm100.emulator.warp import Mask, Warp, active

SPACES = ("param", "global", "shared", "shared::cta", "shared::cluster", "local", "const")
ORDER = ("weak", "relaxed", "acquire", "release", "volatile")
"""Memory orders need no action: warps act one instruction at a time on one memory."""
SCOPES = ("cta", "cluster", "gpu", "sys")
CACHE = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc")


def load(warp: Warp, space: str, address: int, size: int) -> np.ndarray:
    """Bytes at an address of a space ("" is generic)."""
    if address % size:
        raise MemoryFaultError(f"load of {size} B at {address:#x}: misaligned")
    if space == "" and SHARED_WINDOW <= address < PARAMETER_WINDOW:
        space, address = "shared", address - SHARED_WINDOW
    if space.startswith("shared"):
        cta, offset = warp.cta.cluster.locate(address)
        return cta.shared.read(offset, size)
    if address >= PARAMETER_WINDOW and space in ("", "param"):
        return warp.cta.launch.parameters.view(address, size)
    if space == "param":
        raise MemoryFaultError(f"parameter address {address:#x}")
    return warp.cta.launch.memory.view(address, size, write=False)


def store(warp: Warp, space: str, address: int, data: np.ndarray) -> None:
    """Store u8 ``data`` at an address of a space ("" is generic)."""
    if address % len(data):
        raise MemoryFaultError(f"store of {len(data)} B at {address:#x}: misaligned")
    if space == "" and SHARED_WINDOW <= address < PARAMETER_WINDOW:
        space, address = "shared", address - SHARED_WINDOW
    if space.startswith("shared"):
        cta, offset = warp.cta.cluster.locate(address)
        cta.shared.write(offset, data)
        return
    if address >= PARAMETER_WINDOW:
        raise MemoryFaultError("store to the parameter block")
    warp.cta.launch.memory.view(address, len(data), write=True)[:] = data


def _space(decoder: Decoder) -> str:
    space = decoder.one_of(*SPACES, default="")
    if space in ("local", "const"):
        raise UnsupportedError(f"{space} memory")
    return space


def _qualifiers(decoder: Decoder) -> None:
    """Take what changes neither values nor, here, order: orders, scopes, cache and prefetch hints."""
    decoder.one_of(*ORDER, default="")
    decoder.one_of(*SCOPES, default="")
    decoder.one_of(*CACHE, default="")
    for level in ("L1", "L2"):
        for policy in ("evict_last", "evict_first", "no_allocate", "evict_normal", "evict_unchanged"):
            decoder.flag(f"{level}::{policy}")
    for size in ("64B", "128B", "256B"):
        decoder.flag(f"L2::{size}")


def _width(decoder: Decoder) -> int:
    return int(decoder.one_of("v2", "v4", "v8", default="v1")[1:])


@instruction("ld")
def build_ld(decoder: Decoder) -> Execute:
    type_name = decoder.type()
    space, count = _space(decoder), _width(decoder)
    _qualifiers(decoder)
    hint = decoder.flag("L2::cache_hint")
    decoder.arity(3 if hint else 2)
    items = decoder.vector(0)
    if len(items) != count:
        raise UnsupportedError(f"{len(items)} destinations for a vector of {count}")
    address = decoder.address(1)
    dtype = dtype_of(type_name)
    writes = [decoder.write_wide(item, type_name) for item in items]
    size = count * dtype.itemsize

    def execute(warp: Warp, mask: Mask) -> None:
        addresses = address(warp)
        data = np.zeros((LANES, size), np.uint8)
        if space == "param":
            data[:] = load(warp, space, int(addresses[int(active(mask)[0])]), size)
        else:
            for lane in active(mask):
                data[lane] = load(warp, space, int(addresses[lane]), size)
        values = data.view(dtype)
        for column, write in enumerate(writes):
            write(warp, np.ascontiguousarray(values[:, column]), mask)

    return execute


@instruction("st")
def build_st(decoder: Decoder) -> Execute:
    type_name = decoder.type()
    space, count = _space(decoder), _width(decoder)
    _qualifiers(decoder)
    hint = decoder.flag("L2::cache_hint")
    decoder.arity(3 if hint else 2)
    items = decoder.vector(1)
    if len(items) != count:
        raise UnsupportedError(f"{len(items)} sources for a vector of {count}")
    address = decoder.address(0)
    bits = f"b{8 * dtype_of(type_name).itemsize}"
    reads = [decoder.read(item, bits, wider=True) for item in items]

    def execute(warp: Warp, mask: Mask) -> None:
        addresses = address(warp)
        data = matrix([read(warp) for read in reads]).view(np.uint8)
        for lane in active(mask):
            store(warp, space, int(addresses[lane]), data[lane])

    return execute


UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, new: old + new,
    "min": lambda old, new: min(old, new),
    "max": lambda old, new: max(old, new),
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "exch": lambda old, new: new,
}


@instruction("atom", "red")
def build_atomic(decoder: Decoder) -> Execute:
    """atom and red, one element, lanes in lane order (the hardware's order is unspecified)."""
    returns = decoder.instruction.opcode[0] == "atom"
    type_name = decoder.type()
    space = _space(decoder)
    _qualifiers(decoder)
    name = decoder.one_of(*UPDATES, "cas")
    compare = name == "cas"
    decoder.arity(2 + returns + compare)
    dtype = dtype_of(type_name)
    address = decoder.address(int(returns))
    first = decoder.read(1 + returns, type_name)
    second = decoder.read(2 + returns, type_name) if compare else None
    write = decoder.write(0) if returns else None

    def execute(warp: Warp, mask: Mask) -> None:
        addresses, operand = address(warp), first(warp)
        replacement = second(warp) if second is not None else operand
        old = np.zeros(LANES, dtype)
        for lane in active(mask):
            where = int(addresses[lane])
            old[lane] = load(warp, space, where, dtype.itemsize).copy().view(dtype)[0]
            if compare:
                new = replacement[lane] if old[lane] == operand[lane] else old[lane]
            else:
                new = UPDATES[name](old[lane], operand[lane])
            store(warp, space, where, np.array([new], dtype).view(np.uint8))
        warp.cta.launch.events += 1
        if write is not None:
            write(warp, old, mask)

    return execute
