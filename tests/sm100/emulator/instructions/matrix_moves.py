"""ldmatrix and stmatrix: 8 by 8 matrices of 16 bits between shared memory and a warp's registers.

Source: PTX ISA, ``ldmatrix``, ``stmatrix``. Lane 8m + r gives the address of row r of matrix m. Register m of lane t
holds two neighbouring elements of matrix m: in row t / 4 from column 2 (t mod 4) on, or transposed.
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction, matrix
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.instructions.load_store import load_lanes, store_lanes
from tests.sm100.emulator.lane_order import WHOLE
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.warp import Mask, Warp

ROWS = 8
ROW_BYTES = 16


@instruction("ldmatrix", "stmatrix")
def build_matrix_move(decoder: Decoder) -> Execute:
    loads = decoder.instruction.opcode[0] == "ldmatrix"
    decoder.expect("sync", "aligned", "m8n8", "b16")
    count = int(decoder.one_of("x1", "x2", "x4")[1:])
    transposed = decoder.flag("trans")
    space = decoder.one_of("shared", "shared::cta", default="")
    decoder.arity(2)
    items = decoder.vector(0 if loads else 1)
    if len(items) != count:
        raise UnsupportedError(f"{len(items)} registers for x{count}")
    address = decoder.address(1 if loads else 0)
    together = np.full(ROWS * count, WHOLE)
    writes = [decoder.write(item) for item in items] if loads else []
    reads = [] if loads else [decoder.read(item, "b32") for item in items]

    def execute(warp: Warp, mask: Mask) -> None:
        if mask is not None:
            raise HazardError(f"{decoder.instruction.opcode[0]} by part of a warp")
        addresses = address(warp)[: ROWS * count]
        if loads:
            rows = load_lanes(warp, space, addresses, ROW_BYTES, together)
            for number, write in enumerate(writes):
                tile = rows[ROWS * number : ROWS * (number + 1)].copy().view(np.uint16)
                tile = np.ascontiguousarray(tile.T) if transposed else tile
                write(warp, tile.reshape(LANES, 2).view(np.uint32).ravel(), None)
            return
        registers = matrix([read(warp) for read in reads]).view(np.uint16).reshape(LANES, count, 2)
        tiles = registers.transpose(1, 0, 2).reshape(count, ROWS, ROWS)
        if transposed:
            tiles = tiles.transpose(0, 2, 1)
        store_lanes(warp, space, addresses, np.ascontiguousarray(tiles).reshape(-1, ROWS).view(np.uint8), together)

    return execute
