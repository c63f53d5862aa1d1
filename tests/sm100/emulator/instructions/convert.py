"""cvt: conversions between integers, f32, f16, bf16 and the packed 8-bit and 4-bit floats.

Of two sources packed into one register, the first goes to the high half (PTX ISA, ``cvt``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tests.sm100.emulator import formats
from tests.sm100.emulator.decoder import Decoder, Execute, Reader, instruction
from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.emulator.formats import canonical
from tests.sm100.emulator.instructions.arithmetic import flush
from tests.sm100.emulator.instructions.half_arithmetic import WIDEN as HALF
from tests.sm100.emulator.rounding import narrow
from tests.sm100.emulator.scalar_types import DTYPES, LANES, dtype_of
from tests.sm100.emulator.warp import Mask, Warp, active

LARGEST_BF16 = 2.0**128 - 2.0**120
PACKED = {"bf16x2": 16, "f16x2": 16, "e4m3x2": 8, "e5m2x2": 8, "e2m1x2": 4}
"""Bits per element of what two f32 are packed into."""
ENCODE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bf16": formats.to_bf16,
    "f16": formats.to_f16,
    "e4m3": formats.to_e4m3,
    "e5m2": formats.to_e5m2,
    "e2m1": formats.to_e2m1,
}
DECODE = {"e4m3": formats.E4M3, "e5m2": formats.E5M2, "e2m1": formats.E2M1, "ue8m0": formats.UE8M0}
S2F6_ONE = 64.0
"""A fixed-point number of 8 bits, two's complement, has six of them behind the point."""
INTEGER_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@instruction("cvt")
def build_cvt(decoder: Decoder) -> Execute:
    if len(decoder.modifiers) < 2:
        raise UnsupportedError("cvt without two types")
    source, target = decoder.modifiers.pop(), decoder.modifiers.pop()
    if target in PACKED and source == "f32":
        return _pack(decoder, target)
    if target == "s2f6x2" and source in ("f32", "bf16x2"):
        return _pack_fixed(decoder, source)
    if source == "s2f6x2" and target == "bf16x2":
        return _unpack_fixed(decoder)
    if source in ("e4m3x2", "e5m2x2", "e2m1x2", "ue8m0x2") and target in ("f16x2", "bf16x2"):
        return _unpack(decoder, source, target)
    if source in HALF and target == "f32":
        decoder.arity(2)
        widen, read, write = HALF[source], decoder.read(1, "b16"), decoder.write(0)
        return lambda warp, mask: write(warp, widen(read(warp)), mask)
    if source == "f32" and target in HALF:
        decoder.expect("rn")
        decoder.arity(2)
        encode, read, write = ENCODE[target], decoder.read(1, "f32"), decoder.write(0)
        return lambda warp, mask: write(warp, encode(read(warp)), mask)
    if source in HALF and target in DTYPES and target[0] in "us":
        return _scalar(decoder, "f32", target, half=source)
    if source in DTYPES and source[0] in "us" and target in HALF and dtype_of(source).itemsize < 8:
        decoder.expect("rn")
        decoder.arity(2)
        read, write = decoder.read(1, source, wider=True), decoder.write(0)
        return lambda warp, mask: write(warp, narrow(read(warp).astype(np.float64), target), mask)
    if source not in DTYPES or target not in DTYPES:
        raise UnsupportedError(f"cvt.{target}.{source}")
    return _scalar(decoder, source, target)


def _pack(decoder: Decoder, target: str) -> Execute:
    bits = PACKED[target]
    decoder.expect("rn")
    if bits < 16:
        decoder.expect("satfinite")
    relu = decoder.flag("relu")
    decoder.arity(3)
    encode = ENCODE[target.removesuffix("x2")]
    high, low = decoder.read(1, "f32"), decoder.read(2, "f32")
    stored = {16: "b32", 8: "b16", 4: "b8"}[bits]
    write, whole = decoder.write_wide(0, stored), dtype_of(stored)

    def one(values: np.ndarray) -> np.ndarray:
        if relu:
            values = np.where(values > 0, values, np.where(np.isnan(values), values, np.float32(0)))
        return encode(values).astype(whole)

    def execute(warp: Warp, mask: Mask) -> None:
        write(warp, one(high(warp)) << whole.type(bits) | one(low(warp)), mask)

    return execute


def _unpack(decoder: Decoder, source: str, target: str) -> Execute:
    table = DECODE[source.removesuffix("x2")]
    decoder.expect("rn")
    if (target == "bf16x2") != (source == "ue8m0x2"):
        raise UnsupportedError(f"cvt.{target}.{source}")
    relu = decoder.flag("relu")
    if relu:
        raise UnsupportedError("relu")
    decoder.arity(2)
    bits = 4 if source == "e2m1x2" else 8
    stored = np.uint8 if bits == 4 else np.uint16
    codes = stored((1 << bits) - 1)
    encode = ENCODE[target.removesuffix("x2")]
    read, write = decoder.read(1, "b8" if bits == 4 else "b16", wider=True), decoder.write(0)

    def execute(warp: Warp, mask: Mask) -> None:
        both = read(warp)
        low, high = (encode(table[part & codes]).astype(np.uint32) for part in (both, both >> stored(bits)))
        write(warp, high << np.uint32(16) | low, mask)

    return execute


def _pack_fixed(decoder: Decoder, source: str) -> Execute:
    """Two f32, the first goes high, or a bf16x2 to two S2F6: nearest even, clamped to what eight bits hold."""
    decoder.expect("rn", "satfinite")
    relu = decoder.flag("relu")
    if decoder.flag("scaled::n2::ue8m0"):
        raise UnsupportedError("cvt.scaled::n2::ue8m0 to s2f6x2: PTX does not say whether it multiplies by the scale")
    parts: list[Reader]
    if source == "f32":
        decoder.arity(3)
        parts = [decoder.read(1, "f32"), decoder.read(2, "f32")]
    else:
        decoder.arity(2)
        both, half = decoder.read(1, "b32"), np.uint32(16)
        parts = [
            lambda warp: formats.from_bf16((both(warp) >> half).astype(np.uint16)),
            lambda warp: formats.from_bf16(both(warp).astype(np.uint16)),
        ]
    write = decoder.write(0)

    def one(values: np.ndarray, mask: Mask) -> np.ndarray:
        if np.isnan(values[active(mask)]).any():
            raise UnsupportedError("cvt of NaN to s2f6x2: PTX does not say what it gives")
        fixed = np.rint(np.clip(np.nan_to_num(values.astype(np.float64)) * S2F6_ONE, 0 if relu else -128, 127))
        return fixed.astype(np.int8).view(np.uint8).astype(np.uint16)

    def execute(warp: Warp, mask: Mask) -> None:
        high, low = (one(part(warp), mask) for part in parts)
        write(warp, high << np.uint16(8) | low, mask)

    return execute


def _unpack_fixed(decoder: Decoder) -> Execute:
    """Two S2F6 to bf16x2, times a power of two each where there are scales; exact unless out of bf16's range."""
    decoder.expect("rn")
    saturates, relu = decoder.flag("satfinite"), decoder.flag("relu")
    scaled = decoder.flag("scaled::n2::ue8m0")
    decoder.arity(3 if scaled else 2)
    codes, write = decoder.read(1, "b16"), decoder.write(0)
    scales = decoder.read(2, "b16") if scaled else lambda warp: np.full(LANES, 0x7F7F, np.uint16)

    def execute(warp: Warp, mask: Mask) -> None:
        word = np.zeros(LANES, np.uint32)
        for shift in (np.uint16(0), np.uint16(8)):
            fixed = (codes(warp) >> shift).astype(np.uint8).view(np.int8).astype(np.float64)
            if relu:
                fixed = np.maximum(fixed, 0)
            scale = formats.UE8M0[(scales(warp) >> shift).astype(np.uint8)].astype(np.float64)
            value = fixed / S2F6_ONE * scale
            if saturates:
                value = np.clip(value, -LARGEST_BF16, LARGEST_BF16)
            word |= narrow(value, "bf16").astype(np.uint32) << np.uint32(2 * shift)
        write(warp, word, mask)

    return execute


def _scalar(decoder: Decoder, source: str, target: str, half: str = "") -> Execute:
    """Between plain types; ``half`` names a narrower float that the source is widened from."""
    from_dtype, to_dtype = dtype_of(source), dtype_of(target)
    decoder.arity(2)
    ftz, saturate = decoder.flag("ftz"), decoder.flag("sat")
    kinds = from_dtype.kind == "f", to_dtype.kind == "f"
    read = decoder.read(1, "b16" if half else source, wider=True)
    write = decoder.write_wide(0, target)
    convert: Callable[[np.ndarray], np.ndarray]
    if kinds == (True, False):
        rounding = INTEGER_ROUNDING[decoder.one_of(*INTEGER_ROUNDING)]
        low, high = np.iinfo(to_dtype).min, np.iinfo(to_dtype).max

        def clamp(value: float) -> int:
            return (high if value > 0 else low) if math.isinf(value) else max(low, min(high, int(value)))

        def convert(values: np.ndarray) -> np.ndarray:
            # Out of range clamps (PTX ISA: cvt to integers always saturates). NaN gives 0, and in 64 bits the top bit
            # alone (seen on sm_90).
            whole = rounding(flush(values) if ftz else values)
            exact = [0 if math.isnan(v) else clamp(v) for v in whole.tolist()]
            result = np.array(exact, to_dtype)
            if to_dtype.itemsize == 8:
                result[np.isnan(whole)] = np.uint64(1 << 63).astype(to_dtype)
            return result

    elif kinds == (False, True):
        decoder.expect("rn")
        if ftz or saturate:
            raise UnsupportedError("saturating or flushing conversion from an integer")
        convert = lambda values: values.astype(to_dtype)  # noqa: E731
    elif kinds == (True, True):
        if from_dtype != to_dtype:
            if to_dtype.itemsize < from_dtype.itemsize:
                decoder.expect("rn")
            convert = lambda values: values.astype(to_dtype)  # noqa: E731
        else:
            rounding = INTEGER_ROUNDING[decoder.one_of(*INTEGER_ROUNDING)]
            convert = lambda values: canonical(rounding(flush(values) if ftz else values))  # noqa: E731
        if saturate:
            raise UnsupportedError("saturation of floats")
    elif saturate:
        low, high = np.iinfo(to_dtype).min, np.iinfo(to_dtype).max
        convert = lambda values: np.array([max(low, min(high, int(v))) for v in values], to_dtype)  # noqa: E731
    else:
        convert = lambda values: values.astype(to_dtype)  # noqa: E731
    if half:
        return lambda warp, mask: write(warp, convert(HALF[half](read(warp))), mask)
    return lambda warp, mask: write(warp, convert(read(warp)), mask)
