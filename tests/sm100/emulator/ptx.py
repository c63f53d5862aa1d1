"""PTX text to instructions with resolved registers, symbols and labels. Knows syntax, no semantics.

Scopes (``{ … }``) are honoured: a register or a label declared in one hides the outer one of that name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.sm100.emulator.errors import UnsupportedError

CLASSES = {"pred": "pred", **{f"{k}{n}": str(n) for k in "busf" for n in (8, 16, 32, 64)}, "b128": "128"}
"""Register class by declared type: registers of one width share a file whatever their type letter."""


@dataclass(frozen=True)
class Register:
    """A register: its class ("pred", "8", "16", "32", "64", "128") and its index in that class's file."""

    kind: str
    index: int
    name: str = field(compare=False)


@dataclass(frozen=True)
class Special:
    """A read-only special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal: an integer, or the bits of an f32 or f64 (``width`` 32 or 64, 0 for integers)."""

    value: int
    width: int = 0


@dataclass(frozen=True)
class Symbol:
    """The name of a parameter or of an array in memory, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Sink:
    """``_``: the result is thrown away."""


@dataclass(frozen=True)
class Negated:
    """``!%p``"""

    register: Register


@dataclass(frozen=True)
class Vector:
    """``{a, b, …}``"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``d|p``: a result with its predicate."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Memory:
    """``[base + offset]``"""

    base: Operand
    offset: int = 0


@dataclass(frozen=True)
class TensorAddress:
    """``[map, {c0, c1, …}]``: a tensor map's address and box coordinates, dimension 0 first."""

    base: Operand
    coordinates: tuple[Operand, ...]


Operand = Register | Special | Immediate | Symbol | Sink | Negated | Vector | Pair | Memory | TensorAddress

RegisterKey = tuple[str, int]
"""A register's class and its index there."""


def registers_of(operand: Operand) -> list[RegisterKey]:
    """The registers that an operand names, those of an address included."""
    if isinstance(operand, Register):
        return [(operand.kind, operand.index)]
    if isinstance(operand, Negated):
        return registers_of(operand.register)
    if isinstance(operand, Memory):
        return registers_of(operand.base)
    inner: tuple[Operand, ...] = ()
    if isinstance(operand, Vector):
        inner = operand.items
    elif isinstance(operand, Pair):
        inner = operand.first, operand.second
    elif isinstance(operand, TensorAddress):
        inner = operand.base, *operand.coordinates
    return [key for item in inner for key in registers_of(item)]


@dataclass
class Instruction:
    """One instruction. ``opcode`` keeps every dot part; ``targets`` are a branch's instruction indices.

    ``bra`` has one target; ``brx.idx`` has as many as its table, and the index as its operand.
    """

    opcode: tuple[str, ...]
    operands: tuple[Operand, ...]
    text: str
    line: int
    guard: Register | None = None
    guard_negated: bool = False
    targets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: byte offset in the parameter block, and size."""

    name: str
    offset: int
    size: int


@dataclass(eq=False)
class Kernel:
    """One ``.entry``.

    ``shared`` gives (alignment, bytes) of each shared symbol, 0 bytes for the dynamic one; ``local`` likewise of each
    array that every thread has for itself; ``tables`` are the arrays, u8, that the module
    has in global memory.
    """

    name: str
    parameters: list[Parameter]
    parameter_bytes: int
    required_threads: tuple[int, int, int] | None
    registers: Counter[str]
    shared: dict[str, tuple[int, int]]
    instructions: list[Instruction]
    local: dict[str, tuple[int, int]]
    tables: dict[str, np.ndarray]
    target: str
    """The architecture that the module was compiled for, such as sm_100a."""
    decoded: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What launches keep for later ones."""


@dataclass(frozen=True)
class Module:
    """A PTX file: its target and its kernels by name."""

    target: str
    kernels: dict[str, Kernel]


class _Scope:
    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, Register] = {}
        self.labels: dict[str, int] = {}
        self.branch_tables: dict[str, list[str]] = {}

    def chain(self) -> list[_Scope]:
        return [self, *(self.parent.chain() if self.parent else [])]


_SHARED = re.compile(r"(?:\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]$")
_LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]$")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[busf]\d+)\s+"
    r"(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?$"
)
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", re.S)
_LABEL = re.compile(r"([\w$]+):(?!:)")
_BRANCH_TABLE = re.compile(r"([\w$]+):\s*\.branchtargets\s+([^;]+);")
_TABLE = re.compile(r"\.global\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]\s*=\s*\{([\d\s,]*)\}$")
_DEBUG = re.compile(r"^[ \t]*\.(?:loc|file)\b[^\n]*|\.section\s+\.debug_\w+\s*\{[^}]*\}", re.M)
"""What describes the source: it has no effect."""
TABLE_ALIGNMENT = 16
"""Largest alignment of a table."""
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")
_MODULE_LEVEL = re.compile(
    r"\s*(?:\.version\s+[\d.]+|\.target\s+[\w, ]+|\.address_size\s+64"
    r"|\.extern\s+\.shared[^;]*;|\.shared[^;]*;|\.global[^;]*;)"
)


def parse(text: str) -> Module:
    """Read a PTX file.

    Raises:
        UnsupportedError: functions, module-level variables other than shared arrays and tables, unknown directives.
    """
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", _lines_only, text, flags=re.S)
    text = _DEBUG.sub(_lines_only, text)
    found_target = re.search(r"\.target\s+(\w+)", text)
    if not found_target:
        raise UnsupportedError("PTX without a .target directive")
    shared: dict[str, tuple[int, int]] = {}
    tables: dict[str, np.ndarray] = {}
    kernels: dict[str, Kernel] = {}
    position = 0
    while position < len(text):
        entry = _ENTRY.match(text, position + len(text[position:]) - len(text[position:].lstrip()))
        if entry:
            kernel, position = _parse_kernel(text, entry, shared, tables, found_target[1])
            kernels[kernel.name] = kernel
            continue
        directive = _MODULE_LEVEL.match(text, position)
        if not directive:
            rest = text[position:].strip()
            if not rest:
                break
            raise UnsupportedError(f"PTX at module level: {rest.splitlines()[0]!r}")
        declaration = directive[0].strip().rstrip(";")
        array = _SHARED.match(declaration)
        if array:
            shared[array[2]] = int(array[1]), int(array[3] or 0)
        if declaration.startswith(".global"):
            name, contents = _parse_table(declaration)
            tables[name] = contents
        position = directive.end()
    for kernel in kernels.values():
        kernel.shared = {**shared, **kernel.shared}
    return Module(found_target[1], kernels)


def _lines_only(found: re.Match[str]) -> str:
    """What replaces text without effect, so that later lines keep their numbers."""
    return "\n" * found[0].count("\n")


def _parse_table(declaration: str) -> tuple[str, np.ndarray]:
    table = _TABLE.match(declaration)
    if not table or int(table[1]) > TABLE_ALIGNMENT:
        raise UnsupportedError(f"PTX at module level: {declaration!r}")
    values = [int(value) for value in table[4].split(",")]
    contents = np.zeros(int(table[3]), np.uint8)
    contents[: len(values)] = values
    return table[2], contents


def _parse_parameters(text: str) -> tuple[list[Parameter], int]:
    parameters, offset = [], 0
    for piece in filter(None, (piece.strip() for piece in text.split(","))):
        match = _PARAMETER.match(piece)
        if not match:
            raise UnsupportedError(f"parameter declaration {piece!r}")
        width = int(match["type"][1:]) // 8
        size = width * int(match["count"] or 1)
        align = int(match["align"] or width)
        offset = -(-offset // align) * align
        parameters.append(Parameter(match["name"], offset, size))
        offset += size
    return parameters, offset


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    pieces, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            pieces.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*pieces, last] if last else pieces


class _Body:
    """Parses one kernel body."""

    def __init__(self, symbols: set[str]) -> None:
        self.symbols = symbols
        self.shared: dict[str, tuple[int, int]] = {}
        self.local: dict[str, tuple[int, int]] = {}
        self.counts: Counter[str] = Counter()
        self.instructions: list[Instruction] = []
        self.branches: list[tuple[Instruction, str, _Scope]] = []
        """Branches with the label, or the name of the table, that says where they go."""
        self.scope = _Scope(None)

    def declare(self, kind: str, names: str) -> None:
        if kind not in CLASSES:
            raise UnsupportedError(f"register type .{kind}")
        for name in (name.strip() for name in names.split(",")):
            many = re.match(r"(.*)<(\d+)>$", name)
            for one in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                self.scope.registers[one] = Register(CLASSES[kind], self.counts[CLASSES[kind]], one)
                self.counts[CLASSES[kind]] += 1

    def register(self, name: str) -> Register | None:
        return next((scope.registers[name] for scope in self.scope.chain() if name in scope.registers), None)

    def operand(self, text: str) -> Operand:
        if text == "_":
            return Sink()
        if text.startswith("["):
            return self.memory(text[1:-1].strip())
        if text.startswith("{"):
            return Vector(tuple(self.operand(item) for item in _split(text[1:-1])))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self.operand(first.strip()), self.operand(second.strip()))
        if text.startswith("!"):
            negated = self.register(text[1:].strip())
            if negated is None:
                raise UnsupportedError(f"operand {text!r}")
            return Negated(negated)
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return Immediate(int(text[2:], 16), 32)
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return Immediate(int(text[2:], 16), 64)
        if _INTEGER.match(text):
            return Immediate(int(text.rstrip("U"), 0))
        register = self.register(text)
        if register is not None:
            return register
        if text.startswith("%"):
            return Special(text)
        name, _, offset = text.partition("+")
        if name.strip() in self.symbols | self.shared.keys() | self.local.keys():
            return Symbol(name.strip(), int(offset or "0", 0))
        raise UnsupportedError(f"operand {text!r}")

    def memory(self, text: str) -> Operand:
        pieces = _split(text)
        if len(pieces) == 2 and pieces[1].startswith("{"):
            return TensorAddress(self.operand(pieces[0]), tuple(self.operand(c) for c in _split(pieces[1][1:-1])))
        if len(pieces) != 1:
            raise UnsupportedError(f"address [{text}]")
        match = re.match(r"([^+]+?)\s*(?:\+\s*(-?(?:0x[0-9a-fA-F]+|\d+)))?$", text)
        if not match:
            raise UnsupportedError(f"address [{text}]")
        return Memory(self.operand(match[1]), int(match[2] or "0", 0))

    def statement(self, text: str, line: int) -> None:
        if text.startswith(".pragma"):
            return  # hints to ptxas (loop unrolling), without meaning
        declaration = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.S)
        if declaration:
            return self.declare(declaration[1], declaration[2])
        array = _SHARED.match(text)
        if array:
            self.shared[array[2]] = int(array[1]), int(array[3] or 0)
            return None
        array = _LOCAL.match(text)
        if array:
            self.local[array[2]] = int(array[1]), int(array[3])
            return None
        if text.startswith("."):
            raise UnsupportedError("directive")
        text = " ".join(text.split())
        guard, negated, rest = None, False, text
        guarded = re.match(r"@(!?)([%\w$]+)\s+(.*)$", text)
        if guarded:
            guard, negated, rest = self.register(guarded[2]), bool(guarded[1]), guarded[3]
            if guard is None:
                raise UnsupportedError("guard")
        opcode, _, arguments = rest.partition(" ")
        parts = tuple(opcode.split("."))
        pieces = _split(arguments)
        where = pieces.pop() if parts[0] in ("bra", "brx") else None
        instruction = Instruction(parts, tuple(self.operand(piece) for piece in pieces), text, line, guard, negated)
        if where is not None:
            self.branches.append((instruction, where, self.scope))
        self.instructions.append(instruction)
        return None

    def resolve(self) -> None:
        for instruction, where, scope in self.branches:
            labels = [where]
            if instruction.opcode[0] == "brx":
                tables = [level.branch_tables[where] for level in scope.chain() if where in level.branch_tables]
                if not tables:
                    raise UnsupportedError(f"line {instruction.line}: no table of labels {where!r} in reach")
                labels = tables[0]
            instruction.targets = tuple(self.place(label, scope, instruction.line) for label in labels)

    @staticmethod
    def place(label: str, scope: _Scope, line: int) -> int:
        """The index of the instruction that a label stands before."""
        for level in scope.chain():
            if label in level.labels:
                return level.labels[label]
        raise UnsupportedError(f"line {line}: no label {label!r} in reach")


def _parse_kernel(
    text: str, entry: re.Match[str], shared: dict[str, tuple[int, int]], tables: dict[str, np.ndarray], target: str
) -> tuple[Kernel, int]:
    parameters, size = _parse_parameters(entry[2])
    required = None
    for directive in filter(None, (line.strip() for line in entry[3].splitlines())):
        words = directive.replace(",", " ").split()
        if words[0] == ".reqntid":
            required = tuple([int(word) for word in words[1:]] + [1, 1])[:3]
        elif words[0] not in (".minnctapersm", ".maxnreg", ".maxntid", ".reqnctapercluster", ".explicitcluster",
                              ".blocksareclusters", ".maxclusterrank"):  # fmt: skip
            raise UnsupportedError(f"kernel directive {directive!r}")
    body = _Body({parameter.name for parameter in parameters} | shared.keys() | tables.keys())
    position, depth = entry.end(), 1
    line = text.count("\n", 0, position) + 1
    while depth:
        blank = re.compile(r"\s*").match(text, position)
        assert blank is not None
        line += blank[0].count("\n")
        position = blank.end()
        if position >= len(text):
            raise UnsupportedError(f"kernel {entry[1]}: unbalanced braces")
        if text[position] == "{":
            body.scope, depth, position = _Scope(body.scope), depth + 1, position + 1
        elif text[position] == "}":
            depth, position = depth - 1, position + 1
            body.scope = body.scope.parent or body.scope
        elif table := _BRANCH_TABLE.match(text, position):
            body.scope.branch_tables[table[1]] = _split(table[2])
            line += table[0].count("\n")
            position = table.end()
        elif label := _LABEL.match(text, position):
            body.scope.labels[label[1]] = len(body.instructions)
            position = label.end()
        else:
            end = text.index(";", position)
            try:
                body.statement(text[position:end].strip(), line)
            except UnsupportedError as error:
                raise UnsupportedError(f"{error}\n  in line {line}: {text[position:end].strip()}") from error
            line += text.count("\n", position, end)
            position = end + 1
    body.instructions.append(Instruction(("ret",), (), "ret (end of the body)", line))
    body.resolve()
    kernel = Kernel(
        entry[1], parameters, size, required, body.counts, body.shared, body.instructions, body.local, tables,  # type: ignore[arg-type]
        target,
    )  # fmt: skip
    return kernel, position
