"""wgmma: a product of matrices by a warpgroup, whose accumulators, and A if wanted, lie in registers.

``fragments`` says which lane holds what, ``warpgroup`` when a multiplication takes effect, ``warpgroup_registers`` in
which order registers may be accessed. Modelled: m64nNk16 of f16 or bf16 and m64nNk32 of E4M3 and E5M2 with fp32
accumulators; A in registers or in shared memory; of 16 bits, operands in shared memory K-major or MN-major.

Arithmetic: products are exact; one instruction's sum is taken in fp64 and rounded once to fp32 with the accumulator.
The hardware's last bits may differ (it aligns and truncates; of 8-bit operands it keeps fewer bits than fp32 has).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.sm100.emulator.actors import Actor
from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import HazardError, UnsupportedError
from tests.sm100.emulator.formats import canonical
from tests.sm100.emulator.fragments import ROWS, accumulator_places, operand_places
from tests.sm100.emulator.instructions.barriers import uniform
from tests.sm100.emulator.mma import elements
from tests.sm100.emulator.mma_descriptors import ROW_BYTES, MatrixDescriptor
from tests.sm100.emulator.ptx import Operand, Register, Vector
from tests.sm100.emulator.scalar_types import LANES
from tests.sm100.emulator.warp import Blocked, Mask, Warp
from tests.sm100.emulator.warpgroup import WARPS, Warpgroup

TARGET = "sm_90a"
M = WARPS * ROWS
DEPTHS = {"bf16": 16, "f16": 16, "e4m3": 32, "e5m2": 32}


def _check(decoder: Decoder, name: str) -> None:
    if decoder.kernel.target != TARGET:
        raise UnsupportedError(f"{name} for {decoder.kernel.target}: {TARGET} alone has it")
    decoder.expect("sync", "aligned")


def _whole(mask: Mask, name: str) -> None:
    if mask is not None:
        raise HazardError(f"{name} by {np.flatnonzero(mask).size} lanes: it is for whole warps")


@dataclass(frozen=True)
class Form:
    """What one instruction multiplies.

    Attributes:
        columns: N.
        a_type, b_type: element types.
        a_across, b_across: whether an operand in shared memory is MN-major.
        sign: of the products, 1 or -1.
        accumulators: their registers' numbers.
        operands: those of A's registers; None for A in shared memory.
    """

    columns: int
    a_type: str
    b_type: str
    a_across: bool
    b_across: bool
    sign: int
    accumulators: np.ndarray
    operands: np.ndarray | None

    @property
    def held(self) -> np.ndarray:
        """The registers' numbers of A, if it is there."""
        return np.zeros(0, np.int64) if self.operands is None else self.operands

    def execute(self, group: Warpgroup, a: int, b: int, accumulate: bool, actor: Actor) -> None:
        """One instruction of a warpgroup; ``a`` and ``b`` are descriptors, that of A unused if it is in registers."""
        right = _shared(group, b, self.columns, self.b_type, self.b_across, actor)
        left = None if self.operands is not None else _shared(group, a, M, self.a_type, self.a_across, actor)
        places = accumulator_places(self.columns)
        for warp in group.warps:
            first = warp.index % WARPS * ROWS
            rows = self._rows(warp) if left is None else left[first : first + ROWS]
            product = self.sign * (rows @ right.T)
            file = warp.files["32"]
            if accumulate:
                product[places] += np.ascontiguousarray(file[self.accumulators].T).view(np.float32)
            file[self.accumulators] = canonical(product.astype(np.float32))[places].T.view(np.uint32)
        statistics = group.cta.launch.statistics
        statistics.engine_operations["multiply_adds"] += M * self.columns * right.shape[1]

    def _rows(self, warp: Warp) -> np.ndarray:
        """fp64 [16, K] of A from a warp's registers."""
        raw = np.ascontiguousarray(warp.files["32"][self.held].T).view(np.uint8).reshape(LANES, -1)
        values = elements(raw, self.a_type)
        rows = np.empty((ROWS, DEPTHS[self.a_type]))
        rows[operand_places(ROW_BYTES // DEPTHS[self.a_type])] = values
        return rows


def _shared(group: Warpgroup, raw: int, rows: int, kind: str, across: bool, actor: Actor) -> np.ndarray:
    """fp64 [rows, K] of an operand in shared memory."""
    source = MatrixDescriptor.decode_warpgroup(raw)
    size = ROW_BYTES // DEPTHS[kind]
    offsets = source.offsets_across(rows, size) if across else source.offsets(rows, ROW_BYTES)
    return elements(group.cta.shared.gather(offsets, actor), kind)


def _numbers(items: tuple[Operand, ...], count: int, what: str) -> np.ndarray:
    if len(items) != count or not all(isinstance(item, Register) and item.kind == "32" for item in items):
        raise UnsupportedError(f"{what} other than {count} registers of 32 bits")
    return np.array([item.index for item in items if isinstance(item, Register)], np.int64)


def _one_of(decoder: Decoder, operand: int, values: tuple[int, int]) -> int:
    found = decoder.literal(operand)
    if found not in values:
        raise UnsupportedError(f"operand {found}: expected {values[0]} or {values[1]}")
    return found


def _form(decoder: Decoder) -> Form:
    """Take the shape, the types and all operands but descriptors and scale-d."""
    shape = next((part for part in decoder.modifiers if re.match(r"m64n\d+k\d+$", part)), "")
    decoder.flag(shape)
    types = list(decoder.modifiers)
    if len(types) != 3 or types[0] != "f32" or types[1] not in DEPTHS or types[2] not in DEPTHS:
        raise UnsupportedError(f"types .{'.'.join(types)} (fp32 accumulation of f16, bf16, e4m3, e5m2 only)")
    depth, half = DEPTHS[types[1]], types[1] in ("f16", "bf16")
    columns = int(shape[4:].split("k")[0]) if shape else 0
    if shape != f"m64n{columns}k{depth}" or not 8 <= columns <= 256 or columns % 8:
        raise UnsupportedError(f"shape .{shape} of {types[1]}")
    if DEPTHS[types[2]] != depth or (half and types[1] != types[2]):
        raise UnsupportedError(f"types .{types[1]} by .{types[2]}")
    decoder.modifiers.clear()
    in_registers = isinstance(decoder.operands[1], Vector)
    decoder.arity((7 if in_registers else 8) if half else 6)
    signs = _one_of(decoder, 4, (1, -1)) * _one_of(decoder, 5, (1, -1))
    across = [bool(_one_of(decoder, place, (0, 1))) for place in range(6, len(decoder.operands))]
    accumulators = _numbers(decoder.vector(0), columns // 2, "accumulators")
    if len(np.unique(accumulators)) < len(accumulators):
        raise UnsupportedError("a register that is an accumulator twice")
    return Form(
        columns=columns,
        a_type=types[1],
        b_type=types[2],
        a_across=not in_registers and across[:1] == [True],
        b_across=across[-1:] == [True],
        sign=signs,
        accumulators=accumulators,
        operands=_numbers(decoder.vector(1), 4, "A") if in_registers else None,
    )


@instruction("wgmma.mma_async")
def build_mma(decoder: Decoder) -> Execute:
    _check(decoder, "wgmma")
    form = _form(decoder)
    a = decoder.read(1, "u64") if form.operands is None else None
    b, enable = decoder.read(2, "u64"), decoder.read(3, "pred")

    def execute(warp: Warp, mask: Mask) -> None:
        _whole(mask, "wgmma.mma_async")
        if warp.cta.cluster.timing is not None:
            raise UnsupportedError("time of wgmma")
        values = (
            0 if a is None else uniform(a(warp), mask, "A's descriptor"),
            uniform(b(warp), mask, "B's descriptor"),
            bool(uniform(enable(warp), mask, "scale-d")),
        )
        group = warp.cta.warpgroup(warp.index)
        warp.multiplied.issue(form.accumulators, form.held, form.columns)
        joined = group.join(warp, values, lambda actor: form.execute(group, *values, actor))
        joined.registers = form.accumulators, form.held
        warp.multiplications.open.append(joined)
        if len(joined.knowledge) == 1:
            warp.cta.launch.statistics.engine_operations["wgmma"] += 1
        warp.cta.launch.events += 1

    return execute


@instruction("wgmma.fence")
def build_fence(decoder: Decoder) -> Execute:
    """Orders accesses to registers: those of the warp before, those of multiplications after."""
    return _without_operands(decoder, "wgmma.fence", lambda warp: warp.multiplied.fence())


@instruction("wgmma.commit_group")
def build_commit(decoder: Decoder) -> Execute:
    return _without_operands(decoder, "wgmma.commit_group", lambda warp: warp.multiplications.commit())


def _without_operands(decoder: Decoder, name: str, act: Callable[[Warp], None]) -> Execute:
    _check(decoder, name)
    decoder.arity(0)

    def execute(warp: Warp, mask: Mask) -> None:
        _whole(mask, name)
        warp.cta.warpgroup(warp.index).follow(warp)
        act(warp)

    return execute


@instruction("wgmma.wait_group")
def build_wait(decoder: Decoder) -> Execute:
    _check(decoder, "wgmma.wait_group")
    decoder.arity(1)
    keep = decoder.literal(0)

    def execute(warp: Warp, mask: Mask) -> Blocked | None:
        _whole(mask, "wgmma.wait_group")
        older = warp.multiplications.all_but(keep)
        waited_for = next((one for one in older if not one.done), None)
        if waited_for is not None:
            return Blocked(str(waited_for))
        warp.cta.warpgroup(warp.index).follow(warp)
        for one in older:
            warp.multiplied.retire(*one.registers)
        if older and older[-1].known is not None:
            # They take effect in order: the last one's end tells of the others', too.
            warp.actor.learn(older[-1].known)
        warp.multiplications.forget_all_but(keep)
        return None

    return execute
