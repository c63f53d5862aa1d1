"""PTX's scalar types as NumPy dtypes, and the number of lanes of a warp."""

from __future__ import annotations

import numpy as np

from tests.sm100.emulator.errors import UnsupportedError

LANES = 32
LANE_IDS = np.arange(LANES, dtype=np.uint32)

DTYPES: dict[str, np.dtype] = {
    **{f"b{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.dtype(f"u{n // 8}") for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "pred": np.dtype(bool),
    "b128": np.dtype("V16"),
}
"""f16 and the smaller formats have no entry: instructions name them explicitly (see formats.py). Of b128, which is only
moved, NumPy knows the bytes."""


def dtype_of(name: str) -> np.dtype:
    """The dtype of a scalar type name.

    Raises:
        UnsupportedError: the type has no plain dtype (f16, bf16, packed formats).
    """
    if name not in DTYPES:
        raise UnsupportedError(f"type .{name}")
    return DTYPES[name]
