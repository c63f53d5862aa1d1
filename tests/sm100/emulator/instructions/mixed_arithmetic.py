"""add, sub and fma of f32 with operands of half precision, rounded to nearest even.

Source: PTX ISA, mixed precision floating-point instructions: ``fma.rn.f32.bf16 d, a, b, c`` takes a and b in bf16,
``add.f32.f16 d, a, c`` and ``sub`` take a in f16.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.formats import canonical
from tests.sm100.emulator.instructions.arithmetic import fma32, saturate_unit
from tests.sm100.emulator.instructions.half_arithmetic import WIDEN
from tests.sm100.emulator.warp import Mask, Warp

FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {"add": np.add, "sub": np.subtract, "fma": fma32}
OPCODES = [
    f"{name}{rounding}{saturated}.f32.{half}"
    for name in FUNCTIONS
    for rounding in ("", ".rn")
    for saturated in ("", ".sat")
    for half in WIDEN
    if rounding or name != "fma"
]


@instruction(*OPCODES)
def build_mixed(decoder: Decoder) -> Execute:
    name, *parts = decoder.instruction.opcode
    half, saturated = parts[-1], "sat" in parts
    widened = 2 if name == "fma" else 1
    decoder.arity(widened + 2)
    narrow = [decoder.read(1 + i, "b16") for i in range(widened)]
    last, write = decoder.read(1 + widened, "f32"), decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        result = FUNCTIONS[name](*(WIDEN[half](read(warp)) for read in narrow), last(warp))
        write(warp, saturate_unit(result) if saturated else canonical(result), mask)

    return execute
