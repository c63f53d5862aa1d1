"""Comparisons and selection: setp, selp."""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, instruction
from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.instructions.arithmetic import flush
from tests.sm100.emulator.instructions.half_arithmetic import WIDEN
from tests.sm100.emulator.scalar_types import dtype_of
from tests.sm100.emulator.warp import Mask, Warp

ORDERED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FALSE_WITH_NAN = ("eq", "lt", "le", "gt", "ge")
"""Those comparisons that are false in NumPy, too, where an operand is NaN."""
UNORDERED = {f"{name}u": name for name in ORDERED}
"""As the ordered ones, but true where an operand is NaN."""


@instruction("setp")
def build_setp(decoder: Decoder) -> Execute:
    if packed := decoder.one_of("f16x2", "bf16x2", default=""):
        return _setp_packed(decoder, packed.removesuffix("x2"))
    half = decoder.one_of("f16", "bf16", default="")
    type_name = "f32" if half else decoder.type()
    name = decoder.one_of(*ORDERED, *UNSIGNED, *UNORDERED, "num", "nan")
    combine = decoder.one_of("and", "or", "xor", default="")
    ftz = decoder.flag("ftz")
    dtype = dtype_of(type_name)
    is_float = dtype.kind == "f"
    if (name in UNORDERED or name in ("num", "nan") or ftz) and not is_float:
        raise UnsupportedError(f"setp.{name}.{type_name}")
    if type_name[0] == "b" and name not in ("eq", "ne"):
        raise UnsupportedError(f"setp.{name}.{type_name}")
    decoder.arity(4 if combine else 3)
    a, b = decoder.read(1, "b16" if half else type_name), decoder.read(2, "b16" if half else type_name)
    other = decoder.read(3, "pred") if combine else None
    first, second = decoder.pair(0)
    write = decoder.write(first)
    write_second = decoder.write(second) if second is not None else None

    def compare(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if half:
            x, y = WIDEN[half](x), WIDEN[half](y)
        if ftz:
            x, y = flush(x), flush(y)
        if not is_float or name in FALSE_WITH_NAN:
            return ORDERED[UNSIGNED.get(name, name)](x, y)
        unordered = np.isnan(x) | np.isnan(y)
        if name in ("num", "nan"):
            return unordered if name == "nan" else ~unordered
        if name in UNORDERED:
            return ORDERED[UNORDERED[name]](x, y) | unordered
        return ORDERED[UNSIGNED.get(name, name)](x, y) & ~unordered

    logic = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}

    def execute(warp: Warp, mask: Mask) -> None:
        result = compare(a(warp), b(warp))
        opposite = ~result if write_second is not None else None
        if other is not None:
            with_predicate = other(warp)
            result = logic[combine](result, with_predicate)
            if opposite is not None:
                opposite = logic[combine](opposite, with_predicate)
        write(warp, result, mask)
        if write_second is not None and opposite is not None:
            write_second(warp, opposite, mask)

    return execute


def _setp_packed(decoder: Decoder, half: str) -> Execute:
    """Two values to a register: the first predicate is the low one's, the second the high one's."""
    name = decoder.one_of(*ORDERED, *UNORDERED, "num", "nan")
    decoder.arity(3)
    a, b = decoder.read(1, "b32"), decoder.read(2, "b32")
    first, second = decoder.pair(0)
    writes = [decoder.write(first), decoder.write(second) if second is not None else None]

    def execute(warp: Warp, mask: Mask) -> None:
        words = a(warp), b(warp)
        for shift, write in zip((0, 16), writes, strict=True):
            if write is None:
                continue
            x, y = (WIDEN[half]((word >> np.uint32(shift) & np.uint32(0xFFFF)).astype(np.uint16)) for word in words)
            unordered = np.isnan(x) | np.isnan(y)
            if name in ("num", "nan"):
                result = unordered if name == "nan" else ~unordered
            elif name in UNORDERED:
                result = ORDERED[UNORDERED[name]](x, y) | unordered
            else:
                result = ORDERED[name](x, y) & ~unordered
            write(warp, result, mask)

    return execute


@instruction("selp")
def build_selp(decoder: Decoder) -> Execute:
    type_name = decoder.type()
    decoder.arity(4)
    a, b, chosen = decoder.read(1, type_name), decoder.read(2, type_name), decoder.read(3, "pred")
    write = decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        write(warp, np.where(chosen(warp), a(warp), b(warp)), mask)

    return execute
