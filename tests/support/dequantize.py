"""Dequantise a checkpoint directory in plain NumPy: the independent opinion on what its bytes mean.

Parses safetensors and decodes E2M1, E4M3, E8M0 and BF16 by itself, from the formats' definitions and not from the
package. Tensors are returned under the names that the files have; draft layers only on request.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I8": "u1",
    "U8": "u1",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


E4M3 = np.array([_e4m3(byte) for byte in range(256)], dtype=np.float32)
E8M0 = np.array([*(2.0 ** (byte - 127) for byte in range(255)), float("nan")], dtype=np.float32)


def raw_tensors(directory: Path) -> dict[str, tuple[str, np.ndarray]]:
    """``{name: (safetensors dtype, array)}`` over all files; 8-bit floats and BF16 come as their bits."""
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name == "__metadata__":
                continue
            assert name not in tensors, name
            begin, end = entry["data_offsets"]
            values = np.frombuffer(data[start + begin : start + end], dtype=_DTYPES[entry["dtype"]])
            tensors[name] = entry["dtype"], values.reshape(entry["shape"])
    return tensors


SCALE_SUFFIXES = {
    *("weight_scale", "weight_scale_2", "input_scale", "scale", "weight_scale_inv"),
    *("weight_global_scale", "input_global_scale"),
}


def dequantize_checkpoint(directory: str | Path, drafts: bool = False) -> dict[str, np.ndarray]:
    """``{name: fp32 array}``, integers as they are. A quantised matrix appears as ``<stem>.weight``.

    Args:
        drafts: return draft layers, and nothing else.
    """
    raw = {
        name: value
        for name, value in raw_tensors(Path(directory)).items()
        if name.removeprefix("model.").startswith("mtp.") == drafts
    }
    result: dict[str, np.ndarray] = {}
    for name, (dtype, array) in raw.items():
        stem, _, suffix = name.rpartition(".")
        scales = {s: raw[f"{stem}.{s}"] for s in SCALE_SUFFIXES if f"{stem}.{s}" in raw}
        if suffix in SCALE_SUFFIXES and (f"{stem}.weight" in raw or f"{stem}.weight_packed" in raw):
            continue
        if suffix == "weight_packed":
            bare = np.float32(scales["weight_global_scale"][1].reshape(()))
            result[f"{stem}.weight"] = _nvfp4(array, scales["weight_scale"]) / bare
        elif suffix == "weight" and "weight_scale_2" in scales:
            result[name] = _nvfp4(array, scales["weight_scale"]) * scales["weight_scale_2"][1].reshape(())
        elif suffix == "weight" and scales:
            (scale,) = scales.values()
            result[name] = _fp8(array, scale) if dtype == "F8_E4M3" else _mxfp4(dtype, array, scale)
        elif dtype == "BF16":
            result[name] = _bf16(array)
        else:
            assert dtype in ("F32", "I64", "I32"), (name, dtype)
            result[name] = array.copy()
    return result


def _bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _codes(packed: np.ndarray) -> np.ndarray:
    values = np.empty((packed.shape[0], 2 * packed.shape[1]), dtype=np.float32)
    values[:, 0::2] = E2M1[packed & 15]
    values[:, 1::2] = E2M1[packed >> 4]
    return values


def _nvfp4(packed: np.ndarray, block: tuple[str, np.ndarray]) -> np.ndarray:
    assert block[0] == "F8_E4M3" and packed.dtype == np.uint8
    return _codes(packed) * np.repeat(E4M3[block[1]], 16, axis=1)


def _mxfp4(dtype: str, packed: np.ndarray, scale: tuple[str, np.ndarray]) -> np.ndarray:
    assert dtype in ("I8", "U8") and scale[0] == "F8_E8M0"
    return _codes(packed) * np.repeat(E8M0[scale[1]], 32, axis=1)


def _fp8(weight: np.ndarray, scale: tuple[str, np.ndarray]) -> np.ndarray:
    rows, cols = weight.shape
    decoded = {"F8_E8M0": lambda bits: E8M0[bits], "F32": lambda values: values, "BF16": _bf16}[scale[0]](scale[1])
    return E4M3[weight] * decoded.repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :cols]
