"""Moves, packing and unpacking, and conversion between address spaces."""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction, matrix
from tests.sm100.emulator.errors import MemoryFaultError, UnsupportedError
from tests.sm100.emulator.memory import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW, WINDOWS_END
from tests.sm100.emulator.ptx import Vector
from tests.sm100.emulator.scalar_types import LANES, dtype_of
from tests.sm100.emulator.warp import Mask, Warp


@instruction("mov")
def build_mov(decoder: Decoder) -> Execute:
    type_name = decoder.type(moved=True)
    decoder.arity(2)
    if isinstance(decoder.operands[0], Vector):
        return _unpack(decoder, type_name)
    if isinstance(decoder.operands[1], Vector):
        return _pack(decoder, type_name)
    read, write = decoder.read(1, type_name), decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        write(warp, read(warp), mask)

    return execute


def _part(type_name: str, count: int) -> np.dtype:
    """Type of one of ``count`` equal parts."""
    size = dtype_of(type_name).itemsize
    if size % count or size // count < 1:
        raise UnsupportedError(f"{count} parts of .{type_name}")
    return np.dtype(f"u{size // count}")


def _unpack(decoder: Decoder, type_name: str) -> Execute:
    parts = decoder.vector(0)
    part = _part(type_name, len(parts))
    read, writes = decoder.read(1, type_name), [decoder.write(item) for item in parts]

    def execute(warp: Warp, mask: Mask) -> None:
        values = np.ascontiguousarray(read(warp)).view(part).reshape(LANES, -1)
        for column, write in enumerate(writes):
            write(warp, np.ascontiguousarray(values[:, column]), mask)

    return execute


def _pack(decoder: Decoder, type_name: str) -> Execute:
    parts = decoder.vector(1)
    part = _part(type_name, len(parts))
    reads = [decoder.read(item, f"b{8 * part.itemsize}") for item in parts]
    write = decoder.write(0)
    whole = dtype_of(type_name.replace("f", "b").replace("s", "b"))

    def execute(warp: Warp, mask: Mask) -> None:
        write(warp, matrix([read(warp) for read in reads]).view(whole).ravel(), mask)

    return execute


@instruction("cvta")
def build_cvta(decoder: Decoder) -> Execute:
    """Between a space's addresses and generic ones; see memory.py for the windows."""
    decoder.expect("u64")
    to_space = decoder.flag("to")
    space = decoder.one_of("global", "param", "shared", "shared::cta", "shared::cluster", "local", "const")
    decoder.arity(2)
    if space == "const":
        raise UnsupportedError("constant memory")
    read, write = decoder.read(1, "u64"), decoder.write(0)
    start, end = (LOCAL_WINDOW, WINDOWS_END) if space == "local" else (SHARED_WINDOW, PARAMETER_WINDOW)
    window = np.uint64(start)

    def execute(warp: Warp, mask: Mask) -> None:
        address = read(warp)
        if space in ("global", "param"):
            write(warp, address, mask)  # parameters have their window address from the start
        elif to_space:
            inside = (address >= window) & (address < end)
            if not (inside if mask is None else inside[mask]).all():
                raise MemoryFaultError(f"cvta.to.{space} of an address that is not there")
            write(warp, address - window, mask)
        else:
            write(warp, address + window, mask)

    return execute
