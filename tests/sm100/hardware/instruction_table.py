"""A kernel that executes a list of PTX instructions, each on whole columns of operands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from tests.sm100.hardware import values
from tests.sm100.hardware.case import Case, from_bits, untouched

THREADS = 128
COLUMNS = {
    16: {"h": values.halves()},
    32: {
        **{f"i{axis}": values.integers(axis) for axis in range(3)},
        "n": values.shifts(),
        **{f"f{axis}": values.floats(axis) for axis in range(3)},
        "c0": values.narrow_floats(0),
        "c1": values.narrow_floats(1),
        **{f"m{axis}": values.moderate_floats(axis) for axis in range(2)},
        **{f"g{axis}": values.half_pairs(np.float16, axis) for axis in range(3)},
        **{f"b{axis}": values.half_pairs(np.float32, axis) for axis in range(3)},
    },
    64: {f"q{axis}": values.wide_integers(axis) for axis in range(3)},
}
"""Operand columns by register width."""
_WIDTHS = {name: width for width, columns in COLUMNS.items() for name in columns}
_TYPES = {16: (cutlass.Uint16, torch.int16), 32: (cutlass.Uint32, torch.int32), 64: (cutlass.Uint64, torch.int64)}


@dataclass(frozen=True)
class Snippet:
    """PTX on registers ``a``, ``b``, ``c`` that computes ``d``; predicates ``p`` and ``q`` may be used.

    Attributes:
        ptx: e.g. "add.s32 d, a, b;".
        operands: column names for a, b, c, separated by blanks.
        width: of d.
        label: the result's name, the PTX if empty.
    """

    ptx: str
    operands: str
    width: int = 32
    label: str = ""

    @property
    def name(self) -> str:
        """What the result is called."""
        return self.label or f"{self.ptx.split(' ')[0]} {self.operands}"

    def inline(self) -> str:
        """The text with the operands' places, in a scope of its own."""
        places = {"d": "{$w0}", **{letter: f"{{$r{i}}}" for i, letter in enumerate("abc")}}
        body = re.sub(r"(?<![\w.])[abcd](?![\w.])", lambda found: places[found[0]], self.ptx)
        return "{ .reg .pred p, q; .reg .b32 t, u; " + body + " }"


class InstructionTable:
    """The kernel of a list of snippets. Output tensors are [snippets of that width, COUNT]."""

    def __init__(self, snippets: Sequence[Snippet]) -> None:
        self.snippets = list(snippets)

    @cute.jit
    def __call__(self, w16: Any, w32: Any, w64: Any, d16: Any, d32: Any, d64: Any) -> None:
        self.kernel((w16, w32, w64), (d16, d32, d64)).launch(
            grid=(values.COUNT // THREADS, 1, 1), block=(THREADS, 1, 1)
        )

    @cute.kernel
    def kernel(self, sources: Any, targets: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        item = block * THREADS + thread
        rows = {16: 0, 32: 0, 64: 0}
        for number in cutlass.range_constexpr(len(self.snippets)):
            snippet = self.snippets[number]
            arguments = []
            for column in snippet.operands.split():
                width = _WIDTHS[column]
                row = list(COLUMNS[width]).index(column)
                arguments.append(_TYPES[width][0](sources[(16, 32, 64).index(width)][row, item]))
            result = inline_ptx(snippet.inline(), write_only_types=[_TYPES[snippet.width][0]], read_only_args=arguments)
            target = targets[(16, 32, 64).index(snippet.width)]
            target[rows[snippet.width], item] = target.element_type(result)
            rows[snippet.width] += 1


def table_case(name: str, snippets: Sequence[Snippet], ulp: dict[str, int] | None = None) -> Case:
    """A case with one result per snippet."""
    outputs, rows = {}, {}
    for width, (_, dtype) in _TYPES.items():
        names = [snippet.name for snippet in snippets if snippet.width == width]
        # CuTeDSL has no empty tensors: a width that no snippet has gets one row, without a name.
        outputs[f"d{width}"] = untouched((max(1, len(names)), values.COUNT), dtype)
        rows[f"d{width}"] = names
    every = [label for labels in rows.values() for label in labels]
    if len(set(every)) != len(every):
        raise ValueError(f"{name}: two snippets of one name")
    inputs = {
        f"w{width}": from_bits(np.stack(list(columns.values())), _TYPES[width][1]) for width, columns in COLUMNS.items()
    }
    limits = {f"{name}/{label}": limit for label, limit in (ulp or {}).items()}
    return Case(name, InstructionTable(snippets), inputs, outputs, rows, limits)
