"""Tells each warp's ``WarpgroupRegisters`` of instructions that access registers of wgmma."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.sm100.emulator.decoder import Execute
from tests.sm100.emulator.ptx import (
    Immediate,
    Instruction,
    Kernel,
    Memory,
    Operand,
    Register,
    RegisterKey,
    TensorAddress,
    registers_of,
)
from tests.sm100.emulator.warp import Blocked, Mask, Warp

WITHOUT_RESULT = ("bar", "barrier", "brx", "nanosleep", "setmaxnreg")
"""Instructions whose first operand, though no address, is not a result."""


def _numbers(operands: Sequence[Operand], used: set[int]) -> np.ndarray:
    return np.array(sorted({index for kind, index in _keys(operands) if kind == "32" and index in used}), np.int64)


def _is_move(instruction: Instruction) -> bool:
    """Whether it copies a 32-bit register or a constant to another."""
    if instruction.opcode[0] != "mov" or len(instruction.operands) != 2:
        return False
    target, source = instruction.operands
    if not isinstance(target, Register) or target.kind != "32":
        return False
    return isinstance(source, Immediate) or (isinstance(source, Register) and source.kind == "32")


def watched(kernel: Kernel, program: list[Execute | None]) -> list[Execute | None]:
    """The program with checks of what accesses registers that wgmma uses, or that are moved to such."""
    multiplications = [one for one in kernel.instructions if one.opcode[:2] == ("wgmma", "mma_async")]
    used = {index for one in multiplications for kind, index in _keys(one.operands[:2]) if kind == "32"}
    moves = [[index for _, index in _keys(one.operands)] for one in kernel.instructions if _is_move(one)]
    found = len(used) - 1
    while found < len(used):
        found = len(used)
        used.update(move[1] for move in moves if move[0] in used and len(move) == 2)
    if not used:
        return program
    return [
        execute if execute is None or one.opcode[0] == "wgmma" else _watched(one, execute, used)
        for one, execute in zip(kernel.instructions, program, strict=True)
    ]


def _keys(operands: Sequence[Operand]) -> list[RegisterKey]:
    return [key for operand in operands for key in registers_of(operand)]


def _watched(instruction: Instruction, execute: Execute, used: set[int]) -> Execute:
    touched = _numbers(instruction.operands, used)
    if not touched.size:
        return execute
    first = instruction.operands[0]
    has_result = not isinstance(first, Memory | TensorAddress) and instruction.opcode[0] not in WITHOUT_RESULT
    written = _numbers([first] if has_result else [], used)
    move = _is_move(instruction)
    places = [index for _, index in _keys(instruction.operands)] if move else []

    def checked(warp: Warp, mask: Mask) -> Blocked | None:
        if move and not warp.cta.launch.options.strict_moves:
            warp.multiplied.move(touched, places[0], places[1] if len(places) == 2 else None)
        else:
            warp.multiplied.access(touched, written)
        return execute(warp, mask)

    return checked
