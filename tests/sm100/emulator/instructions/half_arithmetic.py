"""Arithmetic of f16 and bf16, one or two to a register; correctly rounded.

Source: PTX ISA, half-precision floating-point instructions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.sm100.emulator import formats
from tests.sm100.emulator.decoder import Decoder, Execute
from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.rounding import narrow, sum_to_odd
from tests.sm100.emulator.warp import Mask, Warp

HALVES = ("f16", "f16x2", "bf16", "bf16x2")
WIDEN = {"f16": formats.from_f16, "bf16": formats.from_bf16}
SIGN = np.uint16(0x8000)
NAN = np.uint16(0x7FFF)
Bits = Callable[..., np.ndarray]
"""From the bits of the operands to those of the result."""


def _rounded(operate: Callable[..., np.ndarray], name: str, relu: bool, saturate: bool) -> Bits:
    def compute(*sources: np.ndarray) -> np.ndarray:
        result = operate(*(WIDEN[name](source).astype(np.float64) for source in sources))
        if saturate:
            result = np.where(np.isnan(result), 0.0, np.clip(result, 0.0, 1.0))
        if relu:
            result = np.where(result < 0, 0.0, result)
        return narrow(result, name)

    return compute


def _picked(larger: bool, name: str, nan: bool) -> Bits:
    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        left, right = WIDEN[name](a), WIDEN[name](b)
        first = left > right if larger else left < right
        # Of zeros, -0 counts as less.
        zeros = (left == 0) & (right == 0)
        first = np.where(zeros, np.signbit(left) != larger, first)
        result = np.where(first, a, b)
        result = np.where(np.isnan(right), a, np.where(np.isnan(left), b, result))
        lost = np.isnan(left) | np.isnan(right) if nan else np.isnan(left) & np.isnan(right)
        return np.where(lost, NAN, result)

    return compute


def _with_sign(negate: bool, name: str) -> Bits:
    """neg or abs; a NaN loses its payload and sign (seen on sm_90)."""

    def compute(bits: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(WIDEN[name](bits)), NAN, bits ^ SIGN if negate else bits & ~SIGN)

    return compute


EXACT: dict[str, Callable[..., np.ndarray]] = {
    "add": sum_to_odd,
    "sub": lambda a, b: sum_to_odd(a, -b),
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: sum_to_odd(a * b, c),
}


def half_operation(name: str, element: str, *, relu: bool = False, saturate: bool = False, nan: bool = False) -> Bits:
    """add, sub, mul, fma, min or max of ``f16`` or ``bf16``."""
    if name in EXACT:
        return _rounded(EXACT[name], element, relu, saturate)
    return _picked(name == "max", element, nan)


def half_arithmetic(decoder: Decoder, name: str) -> Execute:
    """add, sub, mul, fma, min, max, neg, abs."""
    type_name = decoder.one_of(*HALVES)
    packed = type_name.endswith("x2")
    element = type_name.removesuffix("x2")
    compute: Bits
    if name in EXACT:
        decoder.one_of("rn", default="rn" if name != "fma" else None)
        relu = name == "fma" and decoder.flag("relu")
        compute = half_operation(name, element, relu=relu, saturate=decoder.flag("sat"))
        decoder.arity(4 if name == "fma" else 3)
    elif name in ("min", "max"):
        compute = half_operation(name, element, nan=decoder.flag("NaN"))
        decoder.arity(3)
    elif name in ("neg", "abs"):
        compute = _with_sign(name == "neg", element)
        decoder.arity(2)
    else:
        raise UnsupportedError(f"{name}.{type_name}")
    width = "b32" if packed else "b16"
    sources = [decoder.read(i, width) for i in range(1, len(decoder.operands))]
    write = decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        values = [np.ascontiguousarray(source(warp)).view(np.uint16) for source in sources]
        write(warp, compute(*values).view(np.uint32 if packed else np.uint16), mask)

    return execute


def half_function(decoder: Decoder, function: Callable[[np.ndarray], np.ndarray]) -> Execute:
    """An approximate function, given correctly rounded."""
    type_name = decoder.one_of(*HALVES)
    packed, element = type_name.endswith("x2"), type_name.removesuffix("x2")
    decoder.expect("approx")
    ftz = decoder.flag("ftz")
    decoder.arity(2)
    read, write = decoder.read(1, "b32" if packed else "b16"), decoder.write(0)

    def flushed(values: np.ndarray) -> np.ndarray:
        return np.where(np.abs(values) < 2.0**-126, np.copysign(0.0, values), values) if ftz else values

    def execute(warp: Warp, mask: Mask) -> None:
        values = WIDEN[element](np.ascontiguousarray(read(warp)).view(np.uint16)).astype(np.float64)
        result = narrow(flushed(function(flushed(values))), element)
        write(warp, result.view(np.uint32 if packed else np.uint16), mask)

    return execute
