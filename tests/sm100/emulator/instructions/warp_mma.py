"""mma.sync: a product of small matrices whose elements are spread over the registers of a warp.

``fragments`` says which lane holds what.

Arithmetic: products are exact, and their sum with C is taken in fp64 and rounded once. The hardware's last bits may
differ (it aligns and truncates).
"""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction, matrix
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.formats import canonical
from tests.sm100.emulator.fragments import accumulator_places, column_places, operand_places
from tests.sm100.emulator.instructions.half_arithmetic import WIDEN
from tests.sm100.emulator.warp import Mask, Warp

M, N, K = 16, 8, 16
A_PLACES, B_PLACES, C_PLACES = operand_places(2), column_places(), accumulator_places(N)


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
        left[A_PLACES] = widen(matrix([read(warp) for read in a]).view(np.uint16))
        right[B_PLACES] = widen(matrix([read(warp) for read in b]).view(np.uint16))
        total[C_PLACES] = matrix([read(warp) for read in c])
        found = canonical((total + left @ right).astype(np.float32))[C_PLACES]
        for element, write in enumerate(writes):
            write(warp, np.ascontiguousarray(found[:, element]), None)

    return execute
