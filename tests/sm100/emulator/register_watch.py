"""Tells each warp's ``WarpgroupRegisters`` of instructions that access registers of wgmma."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.sm100.emulator.decoder import Execute
from tests.sm100.emulator.ptx import Instruction, Kernel, Memory, Operand, TensorAddress, registers_of
from tests.sm100.emulator.warp import Blocked, Mask, Warp

WITHOUT_RESULT = ("bar", "barrier", "brx", "nanosleep", "setmaxnreg")
"""Instructions whose first operand, though no address, is not a result."""


def watched(kernel: Kernel, program: list[Execute | None]) -> list[Execute | None]:
    """The program with checks of what accesses registers that wgmma uses."""
    used = {
        index
        for one in kernel.instructions
        if one.opcode[:2] == ("wgmma", "mma_async")
        for operand in one.operands[:2]
        for kind, index in registers_of(operand)
        if kind == "32"
    }
    if not used:
        return program
    return [
        execute if execute is None or one.opcode[0] == "wgmma" else _watched(one, execute, used)
        for one, execute in zip(kernel.instructions, program, strict=True)
    ]


def _watched(instruction: Instruction, execute: Execute, used: set[int]) -> Execute:
    def of_interest(operands: Sequence[Operand]) -> list[int]:
        keys = [key for operand in operands for key in registers_of(operand)]
        return sorted({index for kind, index in keys if kind == "32" and index in used})

    touched = np.array(of_interest(instruction.operands), np.int64)
    if not touched.size:
        return execute
    first = instruction.operands[0]
    has_result = not isinstance(first, Memory | TensorAddress) and instruction.opcode[0] not in WITHOUT_RESULT
    written = np.array(of_interest([first]) if has_result else [], np.int64)
    names = [f"32-bit register {index}" for index in touched]

    def checked(warp: Warp, mask: Mask) -> Blocked | None:
        warp.multiplied.access(touched, written, names)
        return execute(warp, mask)

    return checked
