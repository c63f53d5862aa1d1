"""How instructions advance a warp's time: in-order issue of one a cycle, with a scoreboard for loads.

PTX stands in for SASS: branches and moves cost nothing, moves of pairs of 32-bit registers neither; all else costs a
cycle or what ``TimingModel`` says of its kind. A result of a load is waited for by the first instruction that takes it,
moves that cost nothing excepted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, Reader
from tests.sm100.emulator.memory import OFFSET_MASK, PARAMETER_WINDOW, RANK_SHIFT, SHARED_WINDOW
from tests.sm100.emulator.ptx import Instruction, Kernel, RegisterKey, Vector, registers_of
from tests.sm100.emulator.scalar_types import LANES, dtype_of
from tests.sm100.emulator.timing import ClusterTiming, WarpTiming
from tests.sm100.emulator.timing_model import TimingModel
from tests.sm100.emulator.warp import Blocked, Mask, Warp, active

FUNCTIONS = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div")
ROUNDED_FUNCTION_INSTRUCTIONS = 8
"""Instructions beside the function unit's own of a correctly rounded reciprocal, root or quotient."""
BANKS, BANK_BYTES = 32, 4


def _is_load(instruction: Instruction) -> bool:
    return instruction.opcode[0] in ("ld", "ldmatrix", "atom") or instruction.opcode[:2] == ("tcgen05", "ld")


def _renames(instruction: Instruction, model: TimingModel) -> bool:
    """Whether it is a move that no instruction of SASS stands for."""
    return instruction.opcode[0] == "mov" and _fixed_cost(instruction, model) == 0.0


def timed(
    kernel: Kernel, program: list[Execute | None], shared: dict[str, int], model: TimingModel
) -> list[Execute | None]:
    """The program with time."""
    loaded = {key for one in kernel.instructions if _is_load(one) for key in registers_of(one.operands[0])}
    for one in kernel.instructions:
        if _renames(one, model) and loaded.intersection(registers_of(one.operands[1])):
            loaded.update(registers_of(one.operands[0]))
    return [
        None if execute is None else _timed(kernel, instruction, execute, shared, model, loaded)
        for instruction, execute in zip(kernel.instructions, program, strict=True)
    ]


def _timed(
    kernel: Kernel, instruction: Instruction, execute: Execute, shared: dict[str, int], model: TimingModel,
    loaded: set[RegisterKey],
) -> Execute:  # fmt: skip
    operands = list(instruction.operands) + ([instruction.guard] if instruction.guard else [])
    needs = tuple({key for operand in operands for key in registers_of(operand)} & loaded)
    kind = instruction.opcode[0]
    if instruction.opcode[:2] == ("mbarrier", "try_wait") or instruction.opcode[:2] == ("mbarrier", "test_wait"):
        return _timed_wait(execute, Decoder(kernel, instruction, shared).address(1), model)
    if _renames(instruction, model):
        return _timed_move(execute, needs, tuple(registers_of(instruction.operands[0])))
    results = tuple(registers_of(instruction.operands[0])) if _is_load(instruction) else ()
    is_transfer = instruction.opcode[:2] == ("tcgen05", "ld")
    is_transfer_wait = instruction.opcode[:2] == ("tcgen05", "wait::ld")
    accesses = kind in ("ld", "st", "atom", "red")
    access = _access_cost(kernel, instruction, shared, model) if accesses else None
    if kind in ("ldmatrix", "stmatrix"):
        access = _matrix_cost(kernel, instruction, shared, model)
    fixed = _fixed_cost(instruction, model)
    synchronises = kind in ("bar", "barrier")

    def run(warp: Warp, mask: Mask) -> Blocked | None:
        state, clock = _state(warp)[1], warp.actor.clock
        for key in needs:
            clock.time = max(clock.time, state.ready.get(key, 0.0))
        if is_transfer_wait:
            clock.time = max(clock.time, state.transferred)
        issue, latency = (fixed, 0.0) if access is None else access(warp, mask)
        blocked = execute(warp, mask)
        if blocked is not None or state.polling:
            return blocked
        clock.time += issue
        state.issued += min(issue, 1.0) if access is not None or synchronises else issue
        if is_transfer:
            state.reads_accumulators = True
            moved = len(results) * LANES * 4 / model.tensor_memory_bytes_per_cycle
            state.transferred = max(state.transferred, clock.time) + moved
            latency = state.transferred + model.tensor_memory_latency - clock.time
        for key in results:
            state.ready[key] = clock.time + latency
        return None

    return run


def _state(warp: Warp) -> tuple[ClusterTiming, WarpTiming]:
    timing = warp.cta.cluster.timing
    assert timing is not None
    return timing, timing.warp(warp.cta.rank, warp.index)


def _timed_move(execute: Execute, needs: tuple[RegisterKey, ...], results: tuple[RegisterKey, ...]) -> Execute:
    def run(warp: Warp, mask: Mask) -> Blocked | None:
        ready = _state(warp)[1].ready
        time = max((ready.get(key, 0.0) for key in needs), default=0.0)
        ready.update((key, time) for key in results)
        return execute(warp, mask)

    return run


def _timed_wait(execute: Execute, address: Reader, model: TimingModel) -> Execute:
    def run(warp: Warp, mask: Mask) -> Blocked | None:
        (timing, state), clock = _state(warp), warp.actor.clock
        begin = clock.time
        blocked = execute(warp, mask)
        state.polling = warp.spinning is not None
        if blocked is None and not state.polling:
            where = int(address(warp)[active(mask)[0]])
            timing.waited(state, (where >> RANK_SHIFT, where & OFFSET_MASK), begin, clock.time)
            clock.time += model.wait_latency
        return blocked

    return run


def _fixed_cost(instruction: Instruction, model: TimingModel) -> float:
    """Cycles until the warp's next instruction."""
    kind, modifiers = instruction.opcode[0], instruction.opcode[1:]
    if kind in FUNCTIONS:
        return model.function_cycles + (0 if "approx" in modifiers else ROUNDED_FUNCTION_INSTRUCTIONS)
    if kind == "cvt":
        floating = any(part[0] in "fbe" and part[1:2].isdigit() for part in modifiers)
        return model.conversion_cycles if floating else 1.0
    if modifiers[-1:] == ("f32x2",):
        return 2.0  # saves issue slots, not lanes
    if kind == "mov":
        halves = modifiers[-1] == "b32" and any(isinstance(operand, Vector) for operand in instruction.operands)
        return float(halves)
    if kind in ("bar", "barrier") and "sync" in modifiers and modifiers[:1] != ("warp",):
        return model.barrier_latency
    if instruction.opcode[:2] == ("barrier", "cluster") and "wait" in modifiers:
        return model.cluster_latency
    return 1.0


def _access_cost(
    kernel: Kernel, instruction: Instruction, shared: dict[str, int], model: TimingModel
) -> Callable[[Warp, Mask], tuple[float, float]]:
    """(cycles of issue, latency) of a load, store or atomic."""
    modifiers = instruction.opcode[1:]
    if "param" in modifiers or "const" in modifiers:
        return lambda warp, mask: (0.0, 0.0)  # SASS takes constants as operands
    place = 0 if instruction.opcode[0] in ("st", "red") else 1
    address = Decoder(kernel, instruction, shared).address(place)
    count = next((int(part[1:]) for part in modifiers if part in ("v2", "v4", "v8")), 1)
    size = count * dtype_of(modifiers[-1]).itemsize
    is_shared = any(part.startswith("shared") for part in modifiers)

    def cost(warp: Warp, mask: Mask) -> tuple[float, float]:
        where = address(warp)[active(mask)]
        generic = not is_shared and "global" not in modifiers
        if is_shared or (generic and (where >= SHARED_WINDOW).all() and (where < PARAMETER_WINDOW).all()):
            return wavefronts(where, size) * model.warps_sharing, model.shared_latency
        return float(max(1, size * len(where) // 128)), model.global_latency

    return cost


def _matrix_cost(
    kernel: Kernel, instruction: Instruction, shared: dict[str, int], model: TimingModel
) -> Callable[[Warp, Mask], tuple[float, float]]:
    """(cycles of issue, latency) of ldmatrix or stmatrix: each matrix is eight rows of 16 bytes."""
    address = Decoder(kernel, instruction, shared).address(0 if instruction.opcode[0] == "stmatrix" else 1)
    matrices = int(next(part for part in instruction.opcode if part in ("x1", "x2", "x4"))[1:])

    def cost(warp: Warp, mask: Mask) -> tuple[float, float]:
        rows = address(warp).reshape(4, 8)[:matrices]
        return sum(wavefronts(eight, 16) for eight in rows) * model.warps_sharing, model.shared_latency

    return cost


def wavefronts(addresses: np.ndarray, size: int) -> int:
    """Passes over the banks of shared memory that one access of each lane takes at least: a word of each at a time."""
    words = np.unique((addresses.astype(np.int64)[:, None] + np.arange(0, size, BANK_BYTES)) // BANK_BYTES)
    return int(np.bincount(words % BANKS).max())
