"""From an instruction to a closure: operand access, modifier checking, and the table of opcodes.

An instruction family registers a builder under an opcode prefix (``@instruction("mbarrier.init")``). The builder
takes its modifiers one by one from a ``Decoder``; one that nobody took is an error, so a field cannot be ignored
by accident. What it returns is executed for a warp and a mask of lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.sm100.emulator.errors import EmulatorError, UnsupportedError
from tests.sm100.emulator.local_memory import local_layout
from tests.sm100.emulator.memory import PARAMETER_WINDOW
from tests.sm100.emulator.ptx import (
    Immediate,
    Instruction,
    Kernel,
    Memory,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from tests.sm100.emulator.scalar_types import DTYPES, LANES, dtype_of
from tests.sm100.emulator.warp import REGISTER_DTYPES, Blocked, Mask, Warp, view_key

Reader = Callable[[Warp], np.ndarray]
"""Gives 32 values of the dtype asked for; may alias the register file, so it is not to be written to."""
Writer = Callable[[Warp, np.ndarray, Mask], None]
Execute = Callable[[Warp, Mask], Blocked | None]
Builder = Callable[["Decoder"], Execute]

_BUILDERS: dict[tuple[str, ...], Builder] = {}


def instruction(*prefixes: str) -> Callable[[Builder], Builder]:
    """Register a builder for opcodes that begin with one of ``prefixes`` (whole dot parts; the longest wins)."""

    def register(builder: Builder) -> Builder:
        for prefix in prefixes:
            key = tuple(prefix.split("."))
            if key in _BUILDERS:
                raise ValueError(f"{prefix} is registered twice")
            _BUILDERS[key] = builder
        return builder

    return register


class Decoder:
    """One instruction being decoded."""

    def __init__(self, kernel: Kernel, instruction: Instruction, shared: dict[str, int]) -> None:
        self.kernel = kernel
        self.instruction = instruction
        self.operands = list(instruction.operands)
        self.shared = shared
        self.modifiers: list[str] = []

    # -- modifiers

    def flag(self, name: str) -> bool:
        """Take the modifier ``name`` if it is there."""
        if name in self.modifiers:
            self.modifiers.remove(name)
            return True
        return False

    def one_of(self, *names: str, default: str | None = None) -> str:
        """Take the one modifier of ``names`` that is there.

        Raises:
            UnsupportedError: none is, and there is no default.
        """
        for name in names:
            if self.flag(name):
                return name
        if default is None:
            raise UnsupportedError(f"none of .{', .'.join(names)}")
        return default

    def expect(self, *names: str) -> None:
        """Take modifiers that must all be there."""
        for name in names:
            if not self.flag(name):
                raise UnsupportedError(f"modifier .{name} is missing")

    def type(self, moved: bool = False) -> str:
        """Take the last modifier, which must be a scalar type; ``moved`` allows one of 128 bits."""
        if not self.modifiers or self.modifiers[-1] not in DTYPES or (self.modifiers[-1] == "b128" and not moved):
            raise UnsupportedError(f"last part .{self.modifiers[-1] if self.modifiers else ''} as a type")
        return self.modifiers.pop()

    def arity(self, *counts: int) -> None:
        if len(self.operands) not in counts:
            raise UnsupportedError(f"{len(self.operands)} operands")

    # -- operands

    def read(self, operand: int | Operand, type_name: str, wider: bool = False) -> Reader:
        """Access to an operand as a scalar type; ``wider`` allows a register wider than the type (low bits)."""
        if isinstance(operand, int):
            operand = self.operands[operand]
        dtype = dtype_of(type_name)
        if isinstance(operand, Register):
            return self._read_register(operand, dtype, wider)
        if isinstance(operand, Negated):
            index = operand.register.index
            if operand.register.kind != "pred" or type_name != "pred":
                raise UnsupportedError("negation of something that is no predicate")
            return lambda warp: ~warp.files["pred"][index]
        if isinstance(operand, Special):
            return self._read_special(operand.name, dtype)
        if isinstance(operand, Symbol) and operand.name in self.shared:
            return self._read_shared_symbol(self.shared[operand.name] + operand.offset, dtype)
        if isinstance(operand, Immediate | Symbol):
            constant = np.full(LANES, self.constant(operand, dtype))
            constant.flags.writeable = False
            return lambda warp: constant
        raise UnsupportedError(f"operand {operand} as a value")

    @staticmethod
    def _read_register(register: Register, dtype: np.dtype, wider: bool) -> Reader:
        kind, index = register.kind, register.index
        stored = REGISTER_DTYPES[kind]
        if (kind == "pred") != (dtype.kind == "b"):
            raise UnsupportedError(f"{register.name} as {dtype}")
        if stored.itemsize == dtype.itemsize:
            key = view_key(register, dtype)

            def read(warp: Warp) -> np.ndarray:
                found = warp.views.get(key)
                return warp.view(key, register, dtype) if found is None else found

            return read
        if stored.itemsize > dtype.itemsize and wider and dtype.kind in "iu":
            low = np.dtype(f"u{dtype.itemsize}")
            return lambda warp: warp.files[kind][index].astype(low).view(dtype)
        raise UnsupportedError(f"{register.name}, {8 * stored.itemsize} bits wide, as {dtype}")

    @staticmethod
    def _read_special(name: str, dtype: np.dtype) -> Reader:
        def read(warp: Warp) -> np.ndarray:
            if name not in warp.special:
                raise UnsupportedError(f"special register {name}")
            return warp.special[name].astype(dtype)

        return read

    @staticmethod
    def _read_shared_symbol(offset: int, dtype: np.dtype) -> Reader:
        return lambda warp: np.full(LANES, warp.cta.shared_start + offset, dtype)

    def constant(self, operand: Immediate | Symbol, dtype: np.dtype) -> Any:
        """A literal or a symbol's address in ``dtype``."""
        if isinstance(operand, Symbol):
            known = {parameter.name: PARAMETER_WINDOW + parameter.offset for parameter in self.kernel.parameters}
            known |= {name: table.ctypes.data for name, table in self.kernel.tables.items()}
            address = {**known, **local_layout(self.kernel.local)[0]}[operand.name]
            return np.array(address + operand.offset, np.uint64).astype(f"u{dtype.itemsize}").view(dtype)[()]
        if dtype.kind == "b":
            return np.bool_(operand.value != 0)
        if operand.width:
            bits = np.array(operand.value, f"u{operand.width // 8}")
            if dtype.kind != "f":
                if dtype.itemsize * 8 != operand.width:
                    raise UnsupportedError(f"an f{operand.width} literal as {dtype}")
                return bits.view(dtype)[()]
            return bits.view(f"f{operand.width // 8}").astype(dtype)[()]
        if dtype.kind == "f":
            raise UnsupportedError(f"integer literal {operand.value} as {dtype}")
        return np.array(operand.value & ((1 << 8 * dtype.itemsize) - 1), f"u{dtype.itemsize}").view(dtype)[()]

    def literal(self, operand: int) -> int:
        """An operand that must be an integer literal."""
        found = self.operands[operand]
        if not isinstance(found, Immediate) or found.width:
            raise UnsupportedError(f"operand {operand} that is no integer literal")
        return found.value

    def write(self, operand: int | Operand) -> Writer:
        """Access to a destination; values must have the register's width (any type letter), else see widen()."""
        if isinstance(operand, int):
            operand = self.operands[operand]
        if isinstance(operand, Sink):
            return lambda warp, values, mask: None
        if not isinstance(operand, Register):
            raise UnsupportedError(f"operand {operand} as a destination")
        register, stored = operand, REGISTER_DTYPES[operand.kind]
        key = view_key(register, stored)

        def write(warp: Warp, values: np.ndarray, mask: Mask) -> None:
            values = np.asarray(values)
            given = values.dtype
            if given is not stored:
                if given.itemsize != stored.itemsize or (register.kind == "pred") != (given.kind == "b"):
                    raise UnsupportedError(f"{given} into {register.name}, {8 * stored.itemsize} bits wide")
                values = values.view(stored)
            row = warp.views.get(key)
            if row is None:
                row = warp.view(key, register, stored)
            if mask is None:
                row[:] = values
            else:
                np.copyto(row, values, where=mask)

        return write

    def write_wide(self, operand: int | Operand, type_name: str) -> Writer:
        """A destination that may be wider than the type: sign- or zero-extended by the type's letter."""
        if isinstance(operand, int):
            operand = self.operands[operand]
        write = self.write(operand)
        if not isinstance(operand, Register) or operand.kind == "pred":
            return write
        dtype, stored = dtype_of(type_name), REGISTER_DTYPES[operand.kind]
        if stored.itemsize <= dtype.itemsize:
            return write
        wide = np.dtype(f"{'i' if dtype.kind == 'i' else 'u'}{stored.itemsize}")
        return lambda warp, values, mask: write(warp, values.astype(wide), mask)

    def vector(self, operand: int) -> tuple[Operand, ...]:
        """The items of a vector operand, or the one operand."""
        found = self.operands[operand]
        return found.items if isinstance(found, Vector) else (found,)

    def pair(self, operand: int) -> tuple[Operand, Operand | None]:
        """The two of ``d|p``, or one and None."""
        found = self.operands[operand]
        return (found.first, found.second) if isinstance(found, Pair) else (found, None)

    def read_address_register(self, operand: int) -> Reader:
        """u32 tensor-memory addresses of ``[base + offset]``."""
        found = self.operands[operand]
        if not isinstance(found, Memory):
            raise UnsupportedError(f"operand {found} as an address")
        base, offset = self.read(found.base, "u32"), np.uint32(found.offset & (2**32 - 1))
        return lambda warp: base(warp) + offset

    def address(self, operand: int) -> Reader:
        """u64 addresses of ``[base + offset]``; a 32-bit base is a shared-memory address."""
        found = self.operands[operand]
        if not isinstance(found, Memory):
            raise UnsupportedError(f"operand {found} as an address")
        offset = np.uint64(found.offset & (2**64 - 1))
        if isinstance(found.base, Register) and found.base.kind == "32":
            base32 = self.read(found.base, "u32")
            low = np.uint64(0xFFFFFFFF)
            return lambda warp: (base32(warp).astype(np.uint64) + offset) & low
        base = self.read(found.base, "u64")
        return lambda warp: base(warp) + offset


def decode(kernel: Kernel, instruction: Instruction, shared: dict[str, int]) -> Execute:
    """The closure of an instruction other than a branch.

    Raises:
        UnsupportedError: no family knows the opcode, or a modifier or operand form is not modelled.
    """
    parts = instruction.opcode
    try:
        for length in range(len(parts), 0, -1):
            builder = _BUILDERS.get(parts[:length])
            if builder:
                decoder = Decoder(kernel, instruction, shared)
                decoder.modifiers = list(parts[length:])
                execute = builder(decoder)
                if decoder.modifiers:
                    raise UnsupportedError(f"modifiers .{'.'.join(decoder.modifiers)}")
                return execute
        raise UnsupportedError("opcode")
    except EmulatorError as error:
        raise type(error)(f"not modelled: {error}\n  in line {instruction.line}: {instruction.text}") from error


def matrix(values: Sequence[np.ndarray]) -> np.ndarray:
    """Stack per-lane registers to [32, n], contiguous."""
    found = np.empty((len(values[0]), len(values)), values[0].dtype)
    for column, one in enumerate(values):
        found[:, column] = one
    return found
