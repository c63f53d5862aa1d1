"""Integer, logic and floating-point arithmetic.

Source: PTX ISA, integer and floating-point instructions. f32 add, sub, mul, fma and div are correctly rounded;
``ex2``, ``lg2``, ``rcp``, ``rsqrt``, ``sqrt``, ``tanh`` in their approximate forms are given the correctly rounded
value, from which the hardware's differ by the few ulp that PTX states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from tests.sm100.emulator.decoder import Decoder, Execute, Reader, Writer, instruction, matrix
from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.formats import canonical
from tests.sm100.emulator.instructions.half_arithmetic import HALVES, half_arithmetic, half_function
from tests.sm100.emulator.ptx import Immediate
from tests.sm100.emulator.rounding import sum_to_odd
from tests.sm100.emulator.scalar_types import LANE_IDS, LANES, dtype_of
from tests.sm100.emulator.warp import Mask, Warp

Function = Callable[..., np.ndarray]
SMALLEST_NORMAL = 2.0**-126
"""Smallest normal number of f32."""
LOST_BITS, MIDDLE = np.uint64((1 << 29) - 1), np.uint64(1 << 28)
"""Bits of an f64's fraction that an f32 lacks, and what they are in the middle between two f32."""


def flush(values: np.ndarray) -> np.ndarray:
    """Subnormal f32 to zero of the same sign (``.ftz``)."""
    small = np.abs(values) < np.float32(SMALLEST_NORMAL)
    return np.where(small, np.copysign(np.float32(0), values), values) if np.count_nonzero(small) else values


def saturate_unit(values: np.ndarray) -> np.ndarray:
    """``.sat`` of f32: to [0, 1]; NaN and -0 become +0."""
    return np.where(values > 0, np.minimum(values, np.float32(1)), np.float32(0))


def fma_to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fp64 a·b + c of f32 values, rounded to odd: the product is exact."""
    return sum_to_odd(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Correctly rounded f32 a·b + c."""
    nearest = np.multiply(a, b, dtype=np.float64) + c
    # Rounding twice goes wrong only where the first rounding gives the middle between two f32, or below normal ones.
    middles = nearest.view(np.uint64) & LOST_BITS == MIDDLE
    if np.count_nonzero(middles | (np.abs(nearest) < SMALLEST_NORMAL)):
        return fma_to_odd(a, b, c).astype(np.float32)
    return nearest.astype(np.float32)


def below_normal(name: str, sources: Sequence[np.ndarray]) -> np.ndarray:
    """Where ``.ftz`` flushes a result: where it is too small when rounded as if exponents had no limit.

    Rounding as a subnormal may reach the smallest normal number from below; hardware flushes all the same (seen on
    sm_90). A sum of f32 values is exact in that range, so only products matter.
    """
    if name not in ("mul", "fma"):
        return np.zeros(sources[0].shape, bool)
    addend = sources[2] if name == "fma" else np.zeros(1, np.float32)
    unlimited = (fma_to_odd(sources[0], sources[1], addend) * 2.0**64).astype(np.float32)
    return np.abs(unlimited) < np.float32(SMALLEST_NORMAL * 2.0**64)


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Correctly rounded f64 a·b + c."""

    def one(x: float, y: float, z: float) -> float:
        if not math.isfinite(x) or not math.isfinite(y) or not math.isfinite(z) or not x * y:
            return x * y + z
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        try:
            return float(exact)
        except OverflowError:
            return math.copysign(math.inf, exact)

    return np.array([one(*(float(value) for value in lane)) for lane in zip(a, b, c, strict=True)])


FLOAT: dict[str, Function] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": fma32,
    "div": lambda a, b: a / b,
}


def _apply(decoder: Decoder, function: Function, type_name: str) -> Execute:
    """A closure that applies ``function`` to all sources as ``type_name``."""
    sources: list[Reader] = [decoder.read(i, type_name) for i in range(1, len(decoder.operands))]
    write: Writer = decoder.write(0)
    if len(sources) == 2:  # most instructions
        first, second = sources
        return lambda warp, mask: write(warp, function(first(warp), second(warp)), mask)

    def execute(warp: Warp, mask: Mask) -> None:
        write(warp, function(*[source(warp) for source in sources]), mask)

    return execute


def _float(decoder: Decoder, name: str) -> Execute:
    """add, sub, mul, fma, div of f32, f32x2 and f64, rounding to nearest even; of halves where there are such."""
    if decoder.modifiers[-1] in HALVES:
        return half_arithmetic(decoder, name)
    if decoder.modifiers[-1] == "f64":
        return _double(decoder, name)
    packed = decoder.flag("f32x2")
    if not packed:
        decoder.expect("f32")
    approximate = name == "div" and (decoder.flag("full") or decoder.flag("approx"))
    if not approximate:
        decoder.one_of("rn", default="rn" if name != "div" else None)
    ftz, saturate = decoder.flag("ftz"), decoder.flag("sat")
    decoder.arity(4 if name == "fma" else 3)
    operate = FLOAT[name]

    def compute(*sources: np.ndarray) -> np.ndarray:
        if packed:
            sources = tuple(np.ascontiguousarray(source).view(np.float32) for source in sources)
        if ftz:
            sources = tuple(flush(source) for source in sources)
        result = operate(*sources)
        if ftz and np.count_nonzero(np.abs(result) <= np.float32(SMALLEST_NORMAL)):
            result = flush(np.where(below_normal(name, sources), np.copysign(np.float32(0), result), result))
        result = saturate_unit(result) if saturate else canonical(result)
        return result.view(np.uint64) if packed else result

    return _apply(decoder, compute, "b64" if packed else "f32")


def _double(decoder: Decoder, name: str) -> Execute:
    decoder.expect("f64")
    decoder.one_of("rn", default="rn" if name in ("add", "sub", "mul") else None)
    decoder.arity(4 if name == "fma" else 3)
    return _apply(decoder, fma64 if name == "fma" else FLOAT[name], "f64")


def _is_float(decoder: Decoder) -> bool:
    return decoder.modifiers[-1] in ("f32", "f32x2", "f64", *HALVES)


@instruction("add", "sub")
def build_add(decoder: Decoder) -> Execute:
    name = decoder.instruction.opcode[0]
    if _is_float(decoder):
        return _float(decoder, name)
    if name == "add" and decoder.modifiers[-1] in ("s16x2", "u16x2"):
        decoder.modifiers.pop()
        decoder.arity(3)
        return _apply(decoder, lambda a, b: (a.view(np.uint16) + b.view(np.uint16)).view(np.uint32), "b32")
    type_name = decoder.type()
    decoder.arity(3)
    if type_name[0] == "f":
        raise UnsupportedError(f"{name}.{type_name}")
    # Signed and unsigned wrap the same way; unsigned does so in NumPy without a warning.
    return _apply(decoder, FLOAT[name], f"u{type_name[1:]}")


@instruction("mul")
def build_mul(decoder: Decoder) -> Execute:
    if _is_float(decoder):
        return _float(decoder, "mul")
    return _multiply(decoder, add=False)


@instruction("mad")
def build_mad(decoder: Decoder) -> Execute:
    """``mad`` of integers; for floats it is another name of ``fma``."""
    if _is_float(decoder):
        decoder.expect("rn")
        return _float(decoder, "fma")
    return _multiply(decoder, add=True)


def _multiply(decoder: Decoder, add: bool) -> Execute:
    """mul and mad of integers in the forms lo, hi and wide."""
    type_name = decoder.type()
    form = decoder.one_of("lo", "hi", "wide")
    decoder.arity(4 if add else 3)
    dtype = dtype_of(type_name)
    bits = 8 * dtype.itemsize
    if dtype.kind == "f" or (form == "wide" and bits > 32):
        raise UnsupportedError(f"mul.{form}.{type_name}")
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if bits < 64 else None
    a, b = decoder.read(1, type_name), decoder.read(2, type_name)
    result_type = f"{type_name[0]}{2 * bits}" if form == "wide" else type_name
    c = decoder.read(3, result_type) if add else None
    write = decoder.write(0)

    def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if form == "lo":
            return x * y
        if wide is not None:
            full = x.astype(wide) * y.astype(wide)
            return full if form == "wide" else (full >> wide.type(bits)).astype(dtype)
        exact = [(int(p) * int(q) >> 64) & (2**64 - 1) for p, q in zip(x, y, strict=True)]
        return np.array(exact, np.uint64).view(dtype)

    def execute(warp: Warp, mask: Mask) -> None:
        result = product(a(warp), b(warp))
        if c is not None:
            result = result + c(warp)
        write(warp, result, mask)

    return execute


@instruction("fma")
def build_fma(decoder: Decoder) -> Execute:
    return _float(decoder, "fma")


@instruction("div", "rem")
def build_div(decoder: Decoder) -> Execute:
    name = decoder.instruction.opcode[0]
    if _is_float(decoder) and name == "div":
        return _float(decoder, "div")
    type_name = decoder.type()
    decoder.arity(3)
    if type_name not in ("s16", "u16", "s32", "u32", "s64", "u64"):
        raise UnsupportedError(f"{name}.{type_name}")
    dtype = dtype_of(type_name)
    ones = (1 << 8 * dtype.itemsize) - 1

    def divide(x: int, y: int) -> int:
        if y == 0:
            # PTX leaves it unspecified; this is what current hardware gives.
            return -1 if name == "div" else x
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        return quotient if name == "div" else x - quotient * y

    def compute(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        exact = [divide(int(x), int(y)) & ones for x, y in zip(a, b, strict=True)]
        return np.array(exact, f"u{dtype.itemsize}").view(dtype)

    return _apply(decoder, compute, type_name)


@instruction("and", "or", "xor", "not")
def build_logic(decoder: Decoder) -> Execute:
    name = decoder.instruction.opcode[0]
    type_name = decoder.type()
    decoder.arity(2 if name == "not" else 3)
    functions: dict[str, Function] = {
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert
    }  # fmt: skip
    if type_name != "pred" and type_name[0] != "b":
        raise UnsupportedError(f"{name}.{type_name}")
    return _apply(decoder, functions[name], type_name)


@instruction("neg", "abs")
def build_sign(decoder: Decoder) -> Execute:
    name = decoder.instruction.opcode[0]
    if decoder.modifiers[-1] in HALVES:
        return half_arithmetic(decoder, name)
    type_name = decoder.type()
    ftz = decoder.flag("ftz")
    decoder.arity(2)
    if type_name not in ("s16", "s32", "s64", "f32", "f64") or (ftz and type_name != "f32"):
        raise UnsupportedError(f"{name}.{type_name}")
    if type_name == "f32":
        sign = np.uint32(1 << 31)

        def flip(bits: np.ndarray) -> np.ndarray:
            if ftz:
                bits = flush(bits.view(np.float32)).view(np.uint32)
            bits = bits ^ sign if name == "neg" else bits & ~sign
            return canonical(bits.view(np.float32)).view(np.uint32)

        return _apply(decoder, flip, "b32")
    return _apply(decoder, np.negative if name == "neg" else np.abs, type_name)


@instruction("copysign")
def build_copysign(decoder: Decoder) -> Execute:
    """The second source with the sign of the first, bit for bit."""
    decoder.expect("f32")
    decoder.arity(3)
    sign = np.uint32(1 << 31)
    return _apply(decoder, lambda a, b: a & sign | b & ~sign, "b32")


@instruction("shl", "shr")
def build_shift(decoder: Decoder) -> Execute:
    name = decoder.instruction.opcode[0]
    type_name = decoder.type()
    decoder.arity(3)
    dtype = dtype_of(type_name)
    if dtype.kind not in "iu" or (name == "shl" and type_name[0] != "b"):
        raise UnsupportedError(f"{name}.{type_name}")
    bits = 8 * dtype.itemsize
    value, amount = decoder.read(1, type_name), decoder.read(2, "u32")
    write = decoder.write(0)
    if isinstance(known := decoder.operands[2], Immediate) and 0 <= known.value < bits and not known.width:
        shift, constant = np.left_shift if name == "shl" else np.right_shift, dtype.type(known.value)
        return lambda warp, mask: write(warp, shift(value(warp), constant), mask)

    def execute(warp: Warp, mask: Mask) -> None:
        v, n = value(warp), amount(warp)
        inside = np.minimum(n, bits - 1).astype(dtype)
        shifted = v << inside if name == "shl" else v >> inside
        # A shift by the width or more gives 0, or copies of the sign.
        if dtype.kind == "u":
            shifted = np.where(n >= bits, dtype.type(0), shifted)
        write(warp, shifted, mask)

    return execute


@instruction("shf")
def build_funnel(decoder: Decoder) -> Execute:
    decoder.expect("b32")
    left = decoder.one_of("l", "r") == "l"
    wrap = decoder.one_of("wrap", "clamp") == "wrap"
    decoder.arity(4)

    def compute(low: np.ndarray, high: np.ndarray, amount: np.ndarray) -> np.ndarray:
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        n = (amount & np.uint32(31) if wrap else np.minimum(amount, np.uint32(32))).astype(np.uint64)
        return (both << n >> np.uint64(32) if left else both >> n).astype(np.uint32)

    return _apply(decoder, compute, "b32")


@instruction("min", "max")
def build_min_max(decoder: Decoder) -> Execute:
    name = decoder.instruction.opcode[0]
    if decoder.modifiers[-1] in HALVES:
        return half_arithmetic(decoder, name)
    type_name = decoder.type()
    nan, ftz = decoder.flag("NaN"), decoder.flag("ftz")
    decoder.arity(3, 4) if type_name == "f32" else decoder.arity(3)
    if type_name[0] == "b" or type_name == "f64" or (type_name != "f32" and (nan or ftz)):
        raise UnsupportedError(f"{name}.{type_name}")
    if type_name != "f32":
        whole: Function = np.minimum if name == "min" else np.maximum
        if type_name == "s32" and decoder.flag("relu"):  # a negative result becomes 0
            return _apply(decoder, lambda a, b: np.maximum(whole(a, b), np.int32(0)), type_name)
        return _apply(decoder, whole, type_name)
    pick: Function = {
        ("min", False): np.fmin, ("max", False): np.fmax, ("min", True): np.minimum, ("max", True): np.maximum
    }[name, nan]  # fmt: skip

    def two(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        result = pick(a, b)
        zeros = (a == 0) & (b == 0)
        if np.count_nonzero(zeros):  # -0 counts as less than +0
            both = np.signbit(a) & np.signbit(b) if name == "max" else np.signbit(a) | np.signbit(b)
            result = np.where(zeros, np.where(both, np.float32(-0.0), np.float32(0.0)), result)
        return canonical(result)

    def compute(*sources: np.ndarray) -> np.ndarray:
        values = [flush(source) if ftz else source for source in sources]
        result = two(values[0], values[1])
        return two(result, values[2]) if len(values) == 3 else result

    return _apply(decoder, compute, "f32")


APPROXIMATE: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


@instruction(*APPROXIMATE)
def build_special_function(decoder: Decoder) -> Execute:
    name = decoder.instruction.opcode[0]
    if decoder.modifiers[-1] in HALVES and name in ("ex2", "tanh"):
        return half_function(decoder, APPROXIMATE[name])
    decoder.expect("f32")
    decoder.one_of("approx", "rn") if name in ("rcp", "sqrt") else decoder.expect("approx")
    ftz = decoder.flag("ftz")
    decoder.arity(2)

    def compute(x: np.ndarray) -> np.ndarray:
        result = APPROXIMATE[name]((flush(x) if ftz else x).astype(np.float64)).astype(np.float32)
        return canonical(flush(result) if ftz else result)

    return _apply(decoder, compute, "f32")


@instruction("popc", "clz", "brev", "bfind")
def build_bits(decoder: Decoder) -> Execute:
    name = decoder.instruction.opcode[0]
    type_name = decoder.type()
    decoder.arity(2)
    if type_name not in {"bfind": ("u32",), "brev": ("b32",)}.get(name, ("b32", "b64")):
        raise UnsupportedError(f"{name}.{type_name}")
    bits = 8 * dtype_of(type_name).itemsize

    def one(value: int) -> int:
        if name == "popc":
            return value.bit_count()
        if name == "clz":
            return bits - value.bit_length()
        if name == "brev":
            return int(f"{value:032b}"[::-1], 2)
        return (value.bit_length() - 1) & 0xFFFFFFFF

    return _apply(decoder, lambda a: np.array([one(int(v)) for v in a], np.uint32), type_name)


@instruction("bfe")
def build_extract(decoder: Decoder) -> Execute:
    """A field of bits; above the word there are zeros, or copies of the sign, and a signed field is extended."""
    type_name = decoder.type()
    decoder.arity(4)
    if type_name not in ("u32", "s32"):
        raise UnsupportedError(f"bfe.{type_name}")
    signed = type_name == "s32"

    def compute(value: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        start = np.minimum(position.view(np.uint32) & np.uint32(255), 63).astype(np.int64)
        size = np.minimum(length.view(np.uint32) & np.uint32(255), 32).astype(np.int64)
        field = value.astype(np.int64) >> start & ((1 << size) - 1)
        if signed:
            sign = 1 << np.maximum(size - 1, 0)
            field = (field ^ sign) - sign
        return np.where(size == 0, 0, field).astype(value.dtype)

    return _apply(decoder, compute, type_name)


@instruction("lop3")
def build_lop3(decoder: Decoder) -> Execute:
    decoder.expect("b32")
    decoder.arity(5)
    table = decoder.literal(4)
    # Bits of the table are, from the lowest, for 000, 001, ... of the three sources.
    clear, set_ = TWO_SOURCES[table & 15], TWO_SOURCES[table >> 4 & 15]
    sources, write = [decoder.read(i, "b32") for i in (1, 2, 3)], decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        a, b, c = (source(warp) for source in sources)
        without = clear(b, c)
        write(warp, without ^ a & (without ^ set_(b, c)), mask)

    return execute


NONE = np.zeros(LANES, np.uint32)
TWO_SOURCES: tuple[Function, ...] = (
    lambda b, c: NONE,
    lambda b, c: ~(b | c),
    lambda b, c: ~b & c,
    lambda b, c: ~b,
    lambda b, c: b & ~c,
    lambda b, c: ~c,
    lambda b, c: b ^ c,
    lambda b, c: ~(b & c),
    lambda b, c: b & c,
    lambda b, c: ~(b ^ c),
    lambda b, c: c,
    lambda b, c: ~b | c,
    lambda b, c: b,
    lambda b, c: b | ~c,
    lambda b, c: b | c,
    lambda b, c: ~NONE,
)
"""Functions of two sources by their tables: bit 2b + c is what bits b and c give."""


NIBBLES = np.arange(0, 16, 4, dtype=np.uint32)


@instruction("prmt")
def build_permute(decoder: Decoder) -> Execute:
    decoder.expect("b32")
    decoder.arity(4)

    def compute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        bytes_ = matrix([a, b]).view(np.uint8)
        picks = selector[:, None] >> NIBBLES & np.uint32(15)
        values = bytes_[LANE_IDS[:, None], picks & np.uint32(7)]
        signs = picks & np.uint32(8)
        if np.count_nonzero(signs):
            values = np.where(signs, np.where(values & np.uint8(128), np.uint8(255), np.uint8(0)), values)
        return values.view(np.uint32).ravel()

    return _apply(decoder, compute, "b32")
