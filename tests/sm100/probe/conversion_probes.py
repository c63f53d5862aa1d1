"""Conversions between fp32 and the formats of NVFP4: E2M1 codes and E4M3 block scales, by the instructions alone."""

from __future__ import annotations

import numpy as np

from tests.sm100.hardware import values
from tests.sm100.hardware.instruction_table import Snippet, table_case
from tests.sm100.probe.probe import Probe
from tests.support.numpy_nvfp4 import E2M1, E4M3, nearest

E4M3_NAN = 0x7F
E2M1_NAN = 7
"""PTX: a NaN becomes the largest E2M1 magnitude, positive."""

TO_E2M1 = Snippet("{ .reg .b8 x; cvt.rn.satfinite.e2m1x2.f32 x, a, b; cvt.u32.u8 d, x; }", "c0 c1", label="to E2M1")
TO_E4M3 = Snippet("{ .reg .b16 x; cvt.rn.satfinite.e4m3x2.f32 x, a, b; cvt.u32.u16 d, x; }", "c0 c1", label="to E4M3")
FROM_E2M1 = Snippet("{ .reg .b8 x; cvt.u8.u32 x, a; cvt.rn.f16x2.e2m1x2 d, x; }", "i0", label="from E2M1")
FROM_E4M3 = Snippet(
    "{ .reg .b16 x; and.b32 t, a, 0xfefe; cvt.u16.u32 x, t; cvt.rn.f16x2.e4m3x2 d, x; }", "i0", label="from E4M3"
)
"""Even bytes, among which is no NaN: PTX leaves its f16 open."""


def encode(x: np.ndarray, table: np.ndarray, sign: int, nan: int) -> np.ndarray:
    """u32 codes of fp32 ``x``: the nearest of a table of magnitudes, ties to even, saturating."""
    with np.errstate(invalid="ignore"):
        codes = nearest(np.abs(x), table).astype(np.uint32) | np.signbit(x).astype(np.uint32) * sign
    return np.where(np.isnan(x), np.uint32(nan), codes)


def decode(codes: np.ndarray, table: np.ndarray, sign: int) -> np.ndarray:
    """u32, the bits of f16 values of codes."""
    magnitudes = table[codes & (sign - 1)].astype(np.float16).view(np.uint16)
    return magnitudes.astype(np.uint32) | np.where(codes & sign, np.uint32(0x8000), np.uint32(0))


def conversions() -> Probe:
    """The first operand of a pack goes high, as does the high part of what is unpacked."""
    high, low = (values.narrow_floats(axis).view(np.float32) for axis in range(2))
    codes = values.integers(0)
    rows = [
        encode(high, E2M1, 8, E2M1_NAN) << 4 | encode(low, E2M1, 8, E2M1_NAN),
        encode(high, E4M3, 128, E4M3_NAN) << 8 | encode(low, E4M3, 128, E4M3_NAN),
        decode(codes >> 4 & 15, E2M1, 8) << 16 | decode(codes & 15, E2M1, 8),
        decode(codes >> 8 & 0xFE, E4M3, 128) << 16 | decode(codes & 0xFE, E4M3, 128),
    ]
    snippets = (TO_E2M1, TO_E4M3, FROM_E2M1, FROM_E4M3)
    return Probe(
        table_case("conversions", snippets),
        "cvt to and from e2m1x2 and e4m3x2",
        {"d32": np.stack(rows).astype(np.uint32)},
        {"d32": tuple(snippet.label for snippet in snippets)},
    )
