"""mma.sync: a product of small matrices whose elements are spread over the registers of a warp.

Source: PTX ISA, matrix fragments for ``mma.m16n8k16``. Lane 4g + t holds of A rows g and g + 8 at columns 2t, 2t + 1
and those 8 further, of B column g at the same rows, of C and D rows g and g + 8 at columns 2t and 2t + 1.

Arithmetic: products are exact, and their sum with C is taken in fp64 and rounded once. The hardware's last bits may
differ (it aligns and truncates).
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction, matrix
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.formats import canonical
from tests.sm100.emulator.instructions.half_arithmetic import WIDEN
from tests.sm100.emulator.scalar_types import LANE_IDS, LANES
from tests.sm100.emulator.warp import Mask, Warp

M, N, K = 16, 8, 16
GROUP, PLACE = LANE_IDS.astype(np.int64)[:, None] // 4, LANE_IDS.astype(np.int64)[:, None] % 4
_ELEMENT = np.arange(8)[None]
A_ROWS = GROUP + _ELEMENT // 2 % 2 * 8
A_COLUMNS = 2 * PLACE + _ELEMENT % 2 + _ELEMENT // 4 * 8
B_ROWS = (2 * PLACE + _ELEMENT % 2 + _ELEMENT // 2 * 8)[:, :4]
B_COLUMNS = np.broadcast_to(GROUP, (LANES, 4))
C_ROWS, C_COLUMNS = (GROUP + _ELEMENT // 2 * 8)[:, :4], (2 * PLACE + _ELEMENT % 2)[:, :4]


@instruction("mma.sync")
def build_mma(decoder: Decoder) -> Execute:
    """m16n8k16 of f16 or bf16 with fp32 sums."""
    decoder.expect("aligned", "m16n8k16", "row", "col")
    kind = decoder.modifiers[1] if len(decoder.modifiers) == 4 else ""
    if kind not in WIDEN or decoder.modifiers != ["f32", kind, kind, "f32"]:
        raise UnsupportedError(f"types .{'.'.join(decoder.modifiers)}")
    decoder.modifiers.clear()
    decoder.arity(4)
    widen = WIDEN[kind]
    results, a_items, b_items, c_items = (decoder.vector(i) for i in range(4))
    if [len(items) for items in (results, a_items, b_items, c_items)] != [4, 4, 2, 4]:
        raise UnsupportedError("fragments of another size")
    writes = [decoder.write(item) for item in results]
    a, b = ([decoder.read(item, "b32") for item in items] for items in (a_items, b_items))
    c = [decoder.read(item, "f32") for item in c_items]

    def execute(warp: Warp, mask: Mask) -> None:
        if mask is not None:
            raise HazardError("mma.sync by part of a warp")
        left, right, total = np.empty((M, K)), np.empty((K, N)), np.empty((M, N))
        left[A_ROWS, A_COLUMNS] = widen(matrix([read(warp) for read in a]).view(np.uint16))
        right[B_ROWS, B_COLUMNS] = widen(matrix([read(warp) for read in b]).view(np.uint16))
        total[C_ROWS, C_COLUMNS] = matrix([read(warp) for read in c])
        found = canonical((total + left @ right).astype(np.float32))[C_ROWS, C_COLUMNS]
        for element, write in enumerate(writes):
            write(warp, np.ascontiguousarray(found[:, element]), None)

    return execute
