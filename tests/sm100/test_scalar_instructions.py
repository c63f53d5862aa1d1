"""Each scalar instruction against a definition in Python integers, fractions or NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.support.snippets import LANES, evaluate
from tests.support.numpy_nvfp4 import E2M1 as E2M1_MAGNITUDES
from tests.support.numpy_nvfp4 import E4M3, nearest


def integers(dtype: str, seed: int) -> np.ndarray:
    """Random bits with the extremes among them."""
    random = np.random.default_rng(seed)
    info = np.iinfo(dtype)
    values = random.integers(info.min, info.max, LANES, dtype=dtype, endpoint=True)
    values[:6] = np.array([0, 1, info.max, info.min, info.max - 1, info.max // 3], dtype)
    return random.permutation(values)


def floats(seed: int, special: bool = True) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = (random.standard_normal(LANES) * 10.0 ** random.integers(-12, 12, LANES)).astype(np.float32)
    if special:
        values[:7] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e38]
    return random.permutation(values)


def wrap(value: int, dtype: str) -> int:
    bits = 8 * np.dtype(dtype).itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype[0] == "i" and value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


INTEGER: list[tuple[str, list[str], str, Callable[..., int]]] = [
    ("add.s32", ["i4", "i4"], "i4", lambda a, b: a + b),
    ("sub.s64", ["i8", "i8"], "i8", lambda a, b: a - b),
    ("add.s16", ["i2", "i2"], "i2", lambda a, b: a + b),
    ("add.s16x2", ["u4", "u4"], "u4", lambda a, b: (a + b & 0xFFFF) | (a >> 16) + (b >> 16) << 16),
    ("mul.lo.s32", ["i4", "i4"], "i4", lambda a, b: a * b),
    ("mul.hi.s32", ["i4", "i4"], "i4", lambda a, b: a * b >> 32),
    ("mul.hi.u32", ["u4", "u4"], "u4", lambda a, b: a * b >> 32),
    ("mul.hi.u64", ["u8", "u8"], "u8", lambda a, b: a * b >> 64),
    ("mul.hi.s64", ["i8", "i8"], "i8", lambda a, b: a * b >> 64),
    ("mul.wide.s32", ["i4", "i4"], "i8", lambda a, b: a * b),
    ("mul.wide.u16", ["u2", "u2"], "u4", lambda a, b: a * b),
    ("mad.lo.s32", ["i4", "i4", "i4"], "i4", lambda a, b, c: a * b + c),
    ("mad.wide.u32", ["u4", "u4", "u8"], "u8", lambda a, b, c: a * b + c),
    ("div.s32", ["i4", "i4"], "i4", lambda a, b: truncated(a, b) if b else -1),
    ("div.u32", ["u4", "u4"], "u4", lambda a, b: a // b if b else -1),
    ("rem.s64", ["i8", "i8"], "i8", lambda a, b: a - truncated(a, b) * b if b else a),
    ("and.b32", ["u4", "u4"], "u4", lambda a, b: a & b),
    ("or.b64", ["u8", "u8"], "u8", lambda a, b: a | b),
    ("xor.b16", ["u2", "u2"], "u2", lambda a, b: a ^ b),
    ("not.b32", ["u4"], "u4", lambda a: ~a),
    ("neg.s32", ["i4"], "i4", lambda a: -a),
    ("abs.s32", ["i4"], "i4", abs),
    ("min.s32", ["i4", "i4"], "i4", min),
    ("min.relu.s32", ["i4", "i4"], "i4", lambda a, b: max(min(a, b), 0)),
    ("max.relu.s32", ["i4", "i4"], "i4", lambda a, b: max(a, b, 0)),
    ("max.u32", ["u4", "u4"], "u4", max),
    ("popc.b32", ["u4"], "u4", lambda a: bin(a).count("1")),
    ("popc.b64", ["u8"], "u4", lambda a: bin(a).count("1")),
    ("clz.b32", ["u4"], "u4", lambda a: 32 - len(bin(a)) + 2 if a else 32),
    ("clz.b64", ["u8"], "u4", lambda a: 64 - len(bin(a)) + 2 if a else 64),
    ("brev.b32", ["u4"], "u4", lambda a: sum((a >> i & 1) << (31 - i) for i in range(32))),
    ("bfind.u32", ["u4"], "u4", lambda a: a.bit_length() - 1),
    ("prmt.b32", ["u4", "u4", "u4"], "u4", lambda a, b, s: sum(prmt_byte(a, b, s, i) << 8 * i for i in range(4))),
    ("shf.l.wrap.b32", ["u4", "u4", "u4"], "u4", lambda a, b, c: (((b << 32) + a) << (c % 32)) >> 32),
    ("shf.r.clamp.b32", ["u4", "u4", "u4"], "u4", lambda a, b, c: ((b << 32) + a) >> min(c, 32)),
]  # fmt: skip


def prmt_byte(a: int, b: int, selectors: int, place: int) -> int:
    selector = selectors >> 4 * place & 15
    byte = (a.to_bytes(4, "little") + b.to_bytes(4, "little"))[selector & 7]
    return (255 if byte & 128 else 0) if selector & 8 else byte


@pytest.mark.parametrize(("opcode", "sources", "output", "definition"), INTEGER, ids=[case[0] for case in INTEGER])
def test_integer(opcode: str, sources: list[str], output: str, definition: Callable[..., int]) -> None:
    inputs = [integers(dtype, seed) for seed, dtype in enumerate(sources)]
    names = ", ".join(f"{{{i}}}" for i in range(len(sources)))
    found = evaluate(f"{opcode} {{out}}, {names};", inputs, output)
    expected = [wrap(definition(*(int(v) for v in row)), output) for row in zip(*inputs, strict=True)]
    assert found.tolist() == expected


@pytest.mark.parametrize("opcode", ["shl.b32", "shl.b64", "shr.u32", "shr.s32", "shr.u64", "shr.s64", "shr.s16"])
def test_shifts_by_any_amount(opcode: str) -> None:
    kind, bits = opcode.split(".")[1][0], int(opcode.split(".")[1][1:])
    dtype = f"{'i' if kind == 's' else 'u'}{bits // 8}"
    values = integers(dtype, 3)
    amounts = np.arange(LANES, dtype=np.uint32) * 3 % 80
    amounts[-1] = 2**32 - 1
    found = evaluate(f"{opcode} {{out}}, {{0}}, {{1}};", [values, amounts], dtype)
    shift = (lambda v, n: v << min(n, 200)) if opcode[:3] == "shl" else (lambda v, n: v >> min(n, 200))
    assert found.tolist() == [wrap(shift(int(v), int(n)), dtype) for v, n in zip(values, amounts, strict=True)]


def field(value: int, position: int, length: int, signed: bool) -> int:
    """As the PTX ISA spells ``bfe`` out, bit by bit."""
    position, length = position & 255, length & 255
    sign = value >> min(position + length - 1, 31) & 1 if signed and length else 0
    bits = [value >> position + i & 1 if i < length and position + i <= 31 else sign for i in range(32)]
    return wrap(sum(bit << i for i, bit in enumerate(bits)), "i4" if signed else "u4")


@pytest.mark.parametrize("dtype", ["i4", "u4"])
def test_fields_of_bits(dtype: str) -> None:
    values, random = integers(dtype, 3), np.random.default_rng(5)
    positions = random.integers(0, 40, LANES, dtype=np.uint32)
    lengths = random.permutation(np.arange(LANES, dtype=np.uint32) * 5 % 37)
    positions[:3], lengths[-2:] = [255, 256 + 3, 31], [255, 256 + 7]
    found = evaluate(
        f"bfe.{'s' if dtype == 'i4' else 'u'}32 {{out}}, {{0}}, {{1}}, {{2}};", [values, positions, lengths], dtype
    )
    rows = zip(values.tolist(), positions.tolist(), lengths.tolist(), strict=True)
    assert found.tolist() == [field(*row, dtype == "i4") for row in rows]


@pytest.mark.parametrize("table", [0xE8, 0x96, 0x1B])
def test_lop3(table: int) -> None:
    a, b, c = (integers("u4", seed) for seed in range(3))
    found = evaluate(f"lop3.b32 {{out}}, {{0}}, {{1}}, {{2}}, {table};", [a, b, c], "u4")
    for lane in range(LANES):
        bits = [(int(a[lane]) >> i & 1) << 2 | (int(b[lane]) >> i & 1) << 1 | int(c[lane]) >> i & 1 for i in range(32)]
        assert int(found[lane]) == sum((table >> row & 1) << i for i, row in enumerate(bits))


def exact_f32(value: Fraction) -> float:
    """Nearest f32, ties to even, of an exact rational, by search on the bit pattern."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1, -126)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    steps = round(magnitude / unit)  # Python rounds halves to even
    result = steps * unit
    if result >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return math.copysign(float(result), value)


def same(found: np.ndarray, expected: list[float]) -> None:
    """Equal bits, any NaN for a NaN."""
    wanted = np.array(expected, np.float32)
    nan = np.isnan(wanted)
    assert np.isnan(found[nan]).all()
    assert found[~nan].view(np.uint32).tolist() == wanted[~nan].view(np.uint32).tolist()


@pytest.mark.parametrize("opcode", ["fma.rn.f32", "mad.rn.f32"])
def test_fma_is_rounded_once(opcode: str) -> None:
    a, b = floats(1, special=False), floats(2, special=False)
    c = (-a.astype(np.float64) * b).astype(np.float32)  # cancellation leaves only what one rounding keeps
    c[::3] = floats(3, special=False)[::3]
    # Half an ulp plus a sliver: rounding to fp64 first and to fp32 then would go the wrong way.
    a[0], b[0], c[0] = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80
    found = evaluate(f"{opcode} {{out}}, {{0}}, {{1}}, {{2}};", [a, b, c], "f4")
    expected = [exact_f32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c)]  # noqa: B905
    same(found, expected)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_float_arithmetic(name: str) -> None:
    a, b = floats(4, special=False), floats(5, special=False)
    found = evaluate(f"{name}.rn.f32 {{out}}, {{0}}, {{1}};", [a, b], "f4")
    operate = {"add": Fraction.__add__, "sub": Fraction.__sub__, "mul": Fraction.__mul__, "div": Fraction.__truediv__}
    same(found, [exact_f32(operate[name](Fraction(float(x)), Fraction(float(y)))) for x, y in zip(a, b)])  # noqa: B905


@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_pairs_of_floats_act_on_each_half(name: str) -> None:
    sources = [np.stack((floats(i, False), floats(i + 10, False)), axis=1) for i in range(3 if name == "fma" else 2)]
    names = ", ".join(f"{{{i}}}" for i in range(len(sources)))
    packed = [np.ascontiguousarray(source).view(np.uint64).ravel() for source in sources]
    found = evaluate(f"{name}.rn.f32x2 {{out}}, {names};", packed, "u8").view(np.float32).reshape(LANES, 2)
    for half in range(2):
        one = evaluate(f"{name}.rn.f32 {{out}}, {names};", [np.ascontiguousarray(s[:, half]) for s in sources], "f4")
        assert found[:, half].view(np.uint32).tolist() == one.view(np.uint32).tolist()


@pytest.mark.parametrize(("opcode", "nan_wins", "pick"), [
    ("min.f32", False, min), ("max.f32", False, max), ("min.NaN.f32", True, min), ("max.NaN.f32", True, max),
])  # fmt: skip
def test_min_max_of_floats(opcode: str, nan_wins: bool, pick: Callable[[float, float], float]) -> None:
    a, b = floats(6), floats(7)
    a[:3], b[:3] = [np.nan, 0.0, -0.0], [np.nan, -0.0, 0.0]

    def define(x: float, y: float) -> float:
        if math.isnan(x) or math.isnan(y):
            return math.nan if nan_wins or (math.isnan(x) and math.isnan(y)) else (y if math.isnan(x) else x)
        key = lambda v: (v, math.copysign(1, v))  # noqa: E731
        return pick(x, y, key=key)  # type: ignore[call-arg]

    found = evaluate(f"{opcode} {{out}}, {{0}}, {{1}};", [a, b], "f4")
    same(found, [define(float(x), float(y)) for x, y in zip(a, b)])  # noqa: B905


@pytest.mark.parametrize(("comparison", "definition"), [
    ("lt", lambda x, y: x < y), ("ge", lambda x, y: x >= y), ("eq", lambda x, y: x == y),
    ("ne", lambda x, y: x < y or x > y), ("ltu", lambda x, y: not x >= y), ("neu", lambda x, y: x != y),
    ("nan", lambda x, y: x != x or y != y), ("num", lambda x, y: x == x and y == y),
])  # fmt: skip
def test_float_comparisons_with_nan(comparison: str, definition: Callable[[float, float], bool]) -> None:
    a, b = floats(8), floats(9)
    a[4:8] = b[4:8]
    code = f"setp.{comparison}.f32 %p1, {{0}}, {{1}};\nselp.b32 {{out}}, 1, 0, %p1;"
    found = evaluate(code, [a, b], "u4")
    assert found.astype(bool).tolist() == [bool(definition(float(x), float(y))) for x, y in zip(a, b)]  # noqa: B905


@pytest.mark.parametrize(("opcode", "dtype"), [("lt.s32", "i4"), ("lo.u32", "u4"), ("gt.u64", "u8"), ("ge.s16", "i2")])
def test_integer_comparisons(opcode: str, dtype: str) -> None:
    a, b = integers(dtype, 1), integers(dtype, 2)
    a[4:8] = b[4:8]
    found = evaluate(f"setp.{opcode} %p1, {{0}}, {{1}};\nselp.b32 {{out}}, 1, 0, %p1;", [a, b], "u4")
    operate = {"lt": int.__lt__, "lo": int.__lt__, "gt": int.__gt__, "ge": int.__ge__}[opcode.split(".")[0]]
    assert found.tolist() == [int(operate(int(x), int(y))) for x, y in zip(a, b)]  # noqa: B905


def ties() -> np.ndarray:
    """Values at and around the midpoints of E2M1 and E4M3, plus what saturates."""
    middle = (E2M1_MAGNITUDES[1:] + E2M1_MAGNITUDES[:-1]) / 2
    values = [*middle, *np.nextafter(middle.astype(np.float32), np.float32(9)), 6.5, 448, 464, 465, 1e9, 2.0**-10]
    values += [3 * 2.0**-10, 2.0**-9, 0.0, -0.0, np.inf, -np.inf, np.nan, -7.0, -0.25, -0.75]
    return np.resize(np.array(values, np.float32), LANES)


def encode(values: np.ndarray, table: np.ndarray, sign: int, nan: int) -> np.ndarray:
    magnitudes = np.minimum(np.abs(np.nan_to_num(values.astype(np.float64), nan=0.0)), table[-1])
    codes = nearest(magnitudes, table) | np.where(np.signbit(values), sign, 0)
    return np.where(np.isnan(values), nan, codes)


def test_cvt_e2m1x2_puts_its_first_source_high() -> None:
    a, b = ties(), ties()[::-1].copy()
    code = """{{ .reg .b8 %byte;
    cvt.rn.satfinite.e2m1x2.f32 %byte, {0}, {1};
    mov.b32 {out}, {{%byte, 0, 0, 0}}; }}"""
    found = evaluate(code, [a, b], "u4")
    expected = encode(a, E2M1_MAGNITUDES, 8, 7) << 4 | encode(b, E2M1_MAGNITUDES, 8, 7)
    assert found.tolist() == expected.tolist()


def test_cvt_e4m3x2_and_back() -> None:
    a, b = ties(), ties()[::-1].copy()
    found = evaluate("cvt.rn.satfinite.e4m3x2.f32 {out}, {0}, {1};", [a, b], "u2")
    expected = encode(a, E4M3, 128, 127) << 8 | encode(b, E4M3, 128, 127)
    assert found.tolist() == expected.tolist()
    back = evaluate("cvt.rn.f16x2.e4m3x2 {out}, {0};", [found], "u4")
    halves = back.view(np.float16).reshape(LANES, 2)
    byte = expected & 255
    values = np.where(byte & 127 == 127, np.nan, np.append(E4M3, 0)[byte & 127] * np.where(byte & 128, -1, 1))
    np.testing.assert_array_equal(halves[:, 0].astype(np.float64), values)


def fixed(values: np.ndarray, low: int = -128) -> np.ndarray:
    """S2F6 codes: 64ths, nearest even, of 8 bits."""
    return np.array([min(127, max(low, round(Fraction(float(min(max(v, -9), 9))) * 64))) & 255 for v in values], "u4")


@pytest.mark.parametrize(("relu", "low"), [("", -128), (".relu", 0)])
def test_cvt_to_s2f6x2(relu: str, low: int) -> None:
    a, b = (np.random.default_rng(seed).uniform(-2.5, 2.5, LANES).astype(np.float32) for seed in (3, 4))
    a[:7] = [1 / 128, 3 / 128, -1 / 128, 1.992, -2.0, np.inf, -np.inf]
    found = evaluate(f"cvt.rn{relu}.satfinite.s2f6x2.f32 {{out}}, {{0}}, {{1}};", [a, b], "u2")
    assert found.tolist() == (fixed(a, low) << 8 | fixed(b, low)).tolist()
    high, low_half = (v.view(np.uint32) & 0xFFFF0000 for v in (a, b))
    found = evaluate(f"cvt.rn.satfinite{relu}.s2f6x2.bf16x2 {{out}}, {{0}};", [high | low_half >> 16], "u2")
    expected = fixed(high.view(np.float32), low) << 8 | fixed(low_half.view(np.float32), low)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_cvt_s2f6x2_to_bf16x2(relu: bool, scaled: bool) -> None:
    codes = integers("u2", 7)
    scales = np.random.default_rng(8).integers(100, 150, (LANES, 2)).astype(np.uint16)
    packed = scales[:, 0] | scales[:, 1] << np.uint16(8)
    name = "cvt.rn" + ".relu" * relu + ".scaled::n2::ue8m0" * scaled + ".bf16x2.s2f6x2 {out}, {0}" + ", {1}" * scaled
    found = evaluate(f"{name};", [codes, packed], "u4")
    halves = np.stack((found << 16, found & 0xFFFF0000), axis=1).view(np.float32)
    values = np.stack((codes & 255, codes >> 8), axis=1).astype(np.uint8).view(np.int8) / 64.0
    expected = np.maximum(values, 0) if relu else values
    np.testing.assert_array_equal(halves, expected * (2.0 ** (scales.astype(int) - 127) if scaled else 1.0))


def test_cvt_to_s2f6x2_that_ptx_leaves_open_is_refused() -> None:
    a = np.full(LANES, np.nan, np.float32)
    with pytest.raises(UnsupportedError, match="NaN to s2f6x2"):
        evaluate("cvt.rn.satfinite.s2f6x2.f32 {out}, {0}, {0};", [a], "u2")
    scaled = "cvt.rn.satfinite.scaled::n2::ue8m0.s2f6x2.f32 {out}, {0}, {0}, {1};"
    with pytest.raises(UnsupportedError, match="scaled::n2::ue8m0 to s2f6x2"):
        evaluate(scaled, [a, np.zeros(LANES, np.uint16)], "u2")


def test_copysign_takes_the_sign_of_its_first_source() -> None:
    a, b = floats(21), floats(22)
    found = evaluate("copysign.f32 {out}, {0}, {1};", [a, b], "f4")
    np.testing.assert_array_equal(found.view(np.uint32), np.copysign(b, a).view(np.uint32))


def test_cvt_bf16_and_f16() -> None:
    import torch

    a, b = floats(11), floats(12)
    a[:4] = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32).view(np.float32)
    for opcode, dtype in (("bf16x2", torch.bfloat16), ("f16x2", torch.float16)):
        found = evaluate(f"cvt.rn.{opcode}.f32 {{out}}, {{0}}, {{1}};", [a, b], "u4")
        halves = torch.from_numpy(found.view(np.int16).reshape(LANES, 2)).view(dtype)
        expected = torch.stack((torch.from_numpy(b), torch.from_numpy(a)), dim=1).to(dtype)
        assert torch.equal(halves.nan_to_num(123.0), expected.nan_to_num(123.0))


@pytest.mark.parametrize(("rounding", "define"), [
    ("rni", round), ("rzi", math.trunc), ("rmi", math.floor), ("rpi", math.ceil),
])  # fmt: skip
def test_cvt_float_to_integer_clamps(rounding: str, define: Callable[[float], int]) -> None:
    a = floats(13)
    a[:6] = [0.5, 1.5, -2.5, 2147483648.0, -2147483648.0, 3e10]
    found = evaluate(f"cvt.{rounding}.s32.f32 {{out}}, {{0}};", [a], "i4")

    def clamp(value: float) -> int:
        if math.isnan(value):
            return 0
        if math.isinf(value):
            return 2**31 - 1 if value > 0 else -(2**31)
        return max(-(2**31), min(2**31 - 1, define(value)))

    assert found.tolist() == [clamp(float(v)) for v in a]


@pytest.mark.parametrize(("opcode", "source", "target"), [
    ("u32.u16", "u2", "u4"), ("s32.s16", "i2", "i4"), ("s64.s32", "i4", "i8"), ("u16.u32", "u4", "u2"),
    ("u32.u64", "u8", "u4"),
])  # fmt: skip
def test_cvt_between_integers(opcode: str, source: str, target: str) -> None:
    values = integers(source, 5)
    found = evaluate(f"cvt.{opcode} {{out}}, {{0}};", [values], target)
    assert found.tolist() == [wrap(int(v), target) for v in values]


@pytest.mark.parametrize(("opcode", "define"), [
    ("ex2.approx.ftz.f32", lambda v: 2.0**v), ("rcp.approx.ftz.f32", lambda v: 1 / v),
    ("sqrt.approx.f32", lambda v: math.sqrt(v)), ("lg2.approx.f32", lambda v: math.log2(v)),
])  # fmt: skip
def test_special_functions(opcode: str, define: Callable[[float], float]) -> None:
    values = np.abs(np.random.default_rng(0).standard_normal(LANES)).astype(np.float32) + np.float32(0.1)
    found = evaluate(f"{opcode} {{out}}, {{0}};", [values], "f4")
    np.testing.assert_allclose(found, [define(float(v)) for v in values], rtol=1e-7)


def test_packing_and_unpacking() -> None:
    values = integers("u8", 1)
    code = "mov.b64 {{%r1, %r2}}, {0};\nmov.b64 {out}, {{%r2, %r1}};"
    found = evaluate(code, [values], "u8")
    assert found.tolist() == [(int(v) >> 32) | (int(v) & 0xFFFFFFFF) << 32 for v in values]
