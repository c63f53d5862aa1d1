"""f16, bf16 and f64 arithmetic against exact fractions, rounded by their definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.sm100.support.snippets import LANES, evaluate

FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127)}
"""Bits of the significand, smallest and largest exponent of normal numbers."""


def decode(bits: int, name: str) -> float:
    precision, low, high = FORMATS[name]
    fraction_bits = precision - 1
    sign = -1.0 if bits >> 15 else 1.0
    exponent, fraction = (bits & 0x7FFF) >> fraction_bits, bits & ((1 << fraction_bits) - 1)
    if exponent == high - low + 2:
        return math.nan if fraction else sign * math.inf
    scale = low - fraction_bits + max(exponent, 1) - 1
    return sign * (fraction + (1 << fraction_bits if exponent else 0)) * 2.0**scale


def encode(value: Fraction, name: str) -> int:
    """Nearest, ties to even, beyond the largest to infinity."""
    precision, low, high = FORMATS[name]
    sign, magnitude = (0x8000 if value < 0 else 0), abs(value)
    exponent = low
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    units = magnitude / Fraction(2) ** (exponent - precision + 1)
    whole = units.numerator // units.denominator
    rest = units - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2):
        whole += 1
    # A carry into the next exponent adds up by itself, also that from subnormal to normal.
    bits = (exponent - low << precision - 1) + whole
    return sign | min(bits, high - low + 2 << precision - 1)


def operands(name: str, count: int) -> list[np.ndarray]:
    """Random bits, bits with near exponents, and special values."""
    random = np.random.default_rng(count)
    sets = []
    for _ in range(count):
        values = random.integers(0, 1 << 16, LANES, dtype=np.uint16)
        near = np.uint16(15 << 10 if name == "f16" else 127 << 7)
        values[8:20] = near ^ random.integers(0, 1 << (11 if name == "f16" else 9), 12, dtype=np.uint16)
        special = np.array([0, 0x8000, 1, 0x8001, 0x7C00 if name == "f16" else 0x7F80, 0x7FFF], np.uint16)
        values[20:26] = random.permutation(special)
        sets.append(values)
    return sets


Exact = Callable[..., Fraction]
OPERATIONS: dict[str, tuple[int, Exact, Callable[..., float]]] = {
    "add": (2, lambda a, b: a + b, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b, lambda a, b: a * b),
    "fma.rn": (3, lambda a, b, c: a * b + c, lambda a, b, c: a * b + c),
}


def expected(values: list[float], operation: str, name: str) -> int:
    _, exact, plain = OPERATIONS[operation]
    if all(math.isfinite(value) for value in values):
        result = exact(*(Fraction(value) for value in values))
        if result:
            return encode(result, name)
    special = plain(*values)
    if math.isnan(special):
        return 0x7FFF
    bits = 0x7C00 if name == "f16" else 0x7F80
    return (bits if math.isinf(special) else 0) | (0x8000 if math.copysign(1, special) < 0 else 0)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_rounded_once(name: str, operation: str) -> None:
    sources = operands(name, OPERATIONS[operation][0])
    arguments = ", ".join(f"{{{i}}}" for i in range(len(sources)))
    found = evaluate(f"{operation}.{name} {{out}}, {arguments};", sources, "u2")
    wanted = [
        expected([decode(int(bits), name) for bits in lane], operation, name) for lane in zip(*sources, strict=True)
    ]
    assert found.tolist() == wanted
    # The same, two to a register.
    pairs = [source.astype(np.uint32) | np.roll(source, 1).astype(np.uint32) << 16 for source in sources]
    packed = evaluate(f"{operation}.{name}x2 {{out}}, {arguments};", pairs, "u4")
    assert np.array_equal(packed & 0xFFFF, found) and np.array_equal(packed >> 16, np.roll(found, 1))


@pytest.mark.parametrize(("a", "b", "down", "up"), [(1.0625, 1.0625, 144, 145), (1.75, 37 / 64, 129, 130)])
def test_sums_next_to_a_tie(a: float, b: float, down: int, up: int) -> None:
    """a·b lies halfway between two bf16; addends that fp64 or fp32 would lose decide."""
    addends = [sign * 2.0**-exponent for exponent in (20, 30, 40, 60, 100) for sign in (1, -1)]
    bits = [encode(Fraction(value), "bf16") for value in addends]
    sources = [np.array([encode(Fraction(value), "bf16")] * LANES, np.uint16) for value in (a, b)]
    sources.append(np.array((bits * 4)[:LANES], np.uint16))
    found = evaluate("fma.rn.bf16 {out}, {0}, {1}, {2};", sources, "u2")
    wanted = [(up if addend > 0 else down) / 128 for addend in (addends * 4)[:LANES]]
    assert [decode(int(value), "bf16") for value in found] == wanted


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("comparison", ["lt", "neu", "nan"])
def test_comparisons_of_pairs(comparison: str, name: str) -> None:
    """One result for the low halves, one for the high halves."""
    a, b = operands(name, 2)
    pairs = [np.ascontiguousarray(np.stack((half, half[::-1]), axis=1)).view(np.uint32).ravel() for half in (a, b)]
    code = f"setp.{comparison}.{name}x2 %p1|%p2, {{0}}, {{1}};"
    code += "selp.b32 {out}, 1, 0, %p1; @%p2 or.b32 {out}, {out}, 2;"
    with np.errstate(invalid="ignore"):
        x, y = (np.array([decode(int(bits), name) for bits in half]) for half in (a, b))
        low = {"lt": x < y, "neu": x != y, "nan": np.isnan(x) | np.isnan(y)}[comparison]
    assert evaluate(code, pairs, "u4").tolist() == (low + 2 * low[::-1].astype(int)).tolist()


def test_relu_and_saturation() -> None:
    a, b = operands("bf16", 2)
    plain, relu, saturated = (
        evaluate(f"fma.rn{suffix}.{name} {{out}}, {{0}}, {{1}}, {{1}};", [a, b], "u2")
        for suffix, name in (("", "f16"), (".relu", "f16"), (".sat", "f16"))
    )
    for bits, clamped, inside in zip(plain.tolist(), relu.tolist(), saturated.tolist(), strict=True):
        value = decode(bits, "f16")
        assert clamped == (bits if math.isnan(value) or not value < 0 else 0)
        assert decode(inside, "f16") == (0.0 if math.isnan(value) else min(max(value, 0.0), 1.0))


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_min_and_max(name: str, larger: bool, nan: bool) -> None:
    a, b = operands(name, 2)
    b[:4], a[4:6], b[4:6] = a[:4], [0, 0x8000], [0x8000, 0]
    operation = f"{'max' if larger else 'min'}{'.NaN' if nan else ''}.{name}"
    found = evaluate(f"{operation} {{out}}, {{0}}, {{1}};", [a, b], "u2").tolist()
    for x, y, result in zip(a.tolist(), b.tolist(), found, strict=True):
        values = decode(x, name), decode(y, name)
        missing = [math.isnan(value) for value in values]
        if all(missing) or (nan and any(missing)):
            assert result == 0x7FFF
        elif any(missing):
            assert result == (y if missing[0] else x)
        else:
            pick = max if larger else min
            assert result == pick((x, y), key=lambda bits: (decode(bits, name), bits < 0x8000))


def test_signs_comparison_and_conversion() -> None:
    (a,) = operands("f16", 1)
    for opcode, name, signed in (("neg.bf16", "bf16", a ^ 0x8000), ("abs.f16", "f16", a & 0x7FFF)):
        lost = [math.isnan(decode(bits, name)) for bits in a.tolist()]
        found = evaluate(f"{opcode} {{out}}, {{0}};", [a], "u2")
        assert np.array_equal(found, np.where(lost, 0x7FFF, signed))
    for name in FORMATS:
        less = evaluate(f"setp.lt.{name} %p1, {{0}}, {{1}};\nselp.b16 {{out}}, 1, 0, %p1;", [a, np.roll(a, 1)], "u2")
        values = [decode(bits, name) for bits in a.tolist()]
        assert less.tolist() == [int(x < y) for x, y in zip(values, np.roll(values, 1), strict=True)]
        whole = evaluate(f"cvt.rni.s32.{name} {{out}}, {{0}};", [a], "i4").tolist()
        for value, integer in zip(values, whole, strict=True):
            limited = 0.0 if math.isnan(value) else min(max(value, -(2.0**31)), 2.0**31 - 1)
            assert integer == (round(limited) if math.isfinite(limited) else integer)
        numbers = np.random.default_rng(3).integers(-(2**31), 2**31, LANES).astype(np.int32)
        numbers[:6] = [0, 1, -1, 2049, -65519, 257]
        bits = evaluate(f"cvt.rn.{name}.s32 {{out}}, {{0}};", [numbers], "u2").tolist()
        assert bits == [encode(Fraction(int(number)), name) for number in numbers]


@pytest.mark.parametrize("name", FORMATS)
def test_exponential(name: str) -> None:
    values = np.linspace(-12, 12, LANES).astype(np.float32)
    bits = np.array([encode(Fraction(float(value)), name) for value in values], np.uint16)
    ftz = ".ftz" if name == "bf16" else ""
    found = evaluate(f"ex2.approx{ftz}.{name} {{out}}, {{0}};", [bits], "u2").tolist()
    assert found == [encode(Fraction(2.0 ** decode(b, name)), name) for b in bits.tolist()]


def test_double_precision() -> None:
    random = np.random.default_rng(4)
    a, b, c = (random.standard_normal(LANES) * 2.0 ** random.integers(-40, 40, LANES) for _ in range(3))
    c[:16] = -a[:16] * b[:16]
    a[20:24] = [np.inf, np.nan, 0.0, -0.0]
    fused = evaluate("fma.rn.f64 {out}, {0}, {1}, {2};", [a, b, c], "f8")
    for x, y, z, found in zip(a.tolist(), b.tolist(), c.tolist(), fused.tolist(), strict=True):
        if math.isfinite(x) and x:
            assert found == float(Fraction(x) * Fraction(y) + Fraction(z))
        else:
            np.testing.assert_equal(found, x * y + z)
    for operation, definition in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div.rn", np.divide)):
        with np.errstate(invalid="ignore", divide="ignore"):
            wanted = definition(a, b)
        np.testing.assert_array_equal(evaluate(f"{operation}.f64 {{out}}, {{0}}, {{1}};", [a, b], "f8"), wanted)
    np.testing.assert_array_equal(evaluate("neg.f64 {out}, {0};", [a], "f8"), -a)


def rounded(value: Fraction) -> np.float32:
    """fp32, nearest even, of a value in its normal range: fp64 rounded to odd, then once more."""
    near = float(value)
    if Fraction(near) != value and not np.float64(near).view(np.uint64) & 1:
        near = float(np.nextafter(near, math.inf if Fraction(near) < value else -math.inf))
    return np.float32(near)


@pytest.mark.parametrize("half", ["f16", "bf16"])
@pytest.mark.parametrize("opcode", ["add", "add.rn", "sub", "sub.rn", "fma.rn"])
def test_mixed_precision(opcode: str, half: str) -> None:
    """Half-precision a and b with fp32 c; one rounding."""
    name = opcode.removesuffix(".rn")
    random = np.random.default_rng(3)
    near = 15 << 10 if half == "f16" else 127 << 7
    a, b = (
        (near ^ random.integers(0, 1 << 12, LANES) | random.integers(0, 2, LANES) << 15).astype(np.uint16)
        for _ in range(2)
    )
    c = (random.standard_normal(LANES) * 2.0 ** random.integers(-12, 12, LANES)).astype(np.float32)
    widened = [[Fraction(decode(int(bits), half)) for bits in values] for values in (a, b)]
    third = [Fraction(float(value)) for value in c]
    exact = {
        "add": [x + z for x, z in zip(widened[0], third, strict=True)],
        "sub": [x - z for x, z in zip(widened[0], third, strict=True)],
        "fma": [x * y + z for x, y, z in zip(*widened, third, strict=True)],
    }[name]
    sources: list[np.ndarray] = [a, b, c] if name == "fma" else [a, c]
    operands = ", ".join(f"{{{index}}}" for index in range(len(sources)))
    found = evaluate(f"{opcode}.f32.{half} {{out}}, {operands};", sources, "f4")
    assert np.array_equal(found, np.array([rounded(value) for value in exact], np.float32))


def test_mixed_precision_of_special_values() -> None:
    bits = np.full(LANES, 0x3F80, np.uint16)  # one in bf16
    c = np.resize(np.array([np.nan, np.inf, -2.0, 0.25, -1.0], np.float32), LANES)
    found = evaluate("fma.rn.sat.f32.bf16 {out}, {0}, {0}, {1};", [bits, c], "f4")
    assert np.array_equal(found[:5], np.array([0, 1, 0, 1, 0], np.float32))
    assert evaluate("add.f32.bf16 {out}, {0}, {1};", [bits, c], "u4")[0] == 0x7FFFFFFF
