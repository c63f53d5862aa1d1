"""NVFP4 in NumPy, by searching value tables: shares no code with the package."""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BYTES = np.arange(127)
E4M3 = np.where(_BYTES < 8, _BYTES / 8 * 2.0**-6, (1 + _BYTES % 8 / 8) * 2.0 ** (_BYTES // 8 - 7.0))
"""The 127 non-negative finite E4M3 values, in the order of their bytes."""


def nearest(magnitudes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest table entry, ties to the even index, saturating."""
    midpoints = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(midpoints, magnitudes.astype(np.float64), side="left")
    tie = (below < len(midpoints)) & (magnitudes == midpoints[np.minimum(below, len(midpoints) - 1)])
    return below + (tie & (below % 2 == 1))


def quantize_rows(x: np.ndarray, row_scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(values fp64 [T, K] = code * block scale, row scale fp32 [T]); every step in float32 as the recipe says."""
    f = np.float32
    x = x.astype(f)
    blocks = x.reshape(len(x), -1, 16)
    amax = np.abs(blocks).max(-1)
    if row_scale is None:
        g = np.maximum(amax.max(-1), f(2.0**-100)) * f(1 / 2688)
    else:
        g = np.full(len(x), row_scale, f)
    scale = E4M3[nearest((amax * (f(1) / g)[:, None]) * f(1 / 6), E4M3)].astype(f)
    step = (scale * g[:, None])[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = blocks * (f(1) / step)
    scaled[np.broadcast_to(scale[..., None] == 0, scaled.shape)] = 0
    values = np.sign(scaled) * E2M1[nearest(np.abs(scaled), E2M1)] * scale[..., None]
    return values.reshape(x.shape).astype(np.float64), g


def dequantize(packed: np.ndarray, block_scale_bytes: np.ndarray) -> np.ndarray:
    """fp64 [..., N, K] code * block scale, from packed bytes [..., N, K/2] and E4M3 bytes [..., N, K/16]."""
    codes = np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], -1)
    values = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    return values * np.repeat(E4M3[block_scale_bytes], 16, axis=-1)


def quantize_weight(w: np.ndarray, amax: float | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ModelOpt's recipe for weights fp32 [N, K]: packed bytes, E4M3 bytes of block scales, global scale; in float32.

    ``amax`` is the maximum that the global scale is made for, the matrix's own unless given.
    """
    f = np.float32
    g = np.maximum(f(np.abs(w).max() if amax is None else amax), f(2.0**-100)) / f(2688)
    blocks = w.astype(f).reshape(len(w), -1, 16)
    s = np.abs(blocks).max(-1) / (f(6) * g)
    scale = nearest(np.clip(np.where(s == 0, f(1), s), f(2.0**-9), f(448)), E4M3).astype(np.uint8)
    return *encode(w, scale, g), g


def encode(w: np.ndarray, scale: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes of fp32 [N, K] under E4M3 bytes of block scales and a global scale; and these bytes."""
    blocks = w.astype(np.float32).reshape(len(w), -1, 16)
    scaled = blocks / (E4M3[scale].astype(np.float32) * g)[..., None]
    codes = (nearest(np.abs(scaled), E2M1) | np.where(np.signbit(scaled), 8, 0)).astype(np.uint8).reshape(w.shape)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scale
