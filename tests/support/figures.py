"""How far two checkpoints are apart, in plain NumPy and fp64: nothing of the package but the mapping of names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nvfp4_sgl.checkpoint.transformers_names import original_name
from tests.support.dequantize import dequantize_checkpoint


@dataclass(frozen=True)
class Figures:
    """How a tensor compares: relative RMS error, cosine, the worst block's error, and equal blocks of all blocks."""

    rms: float
    cosine: float
    worst: float
    equal: int
    blocks: int


def values_by_name(directory: Path) -> dict[str, np.ndarray]:
    """fp32 values by DeepSeek's original names."""
    return {original_name(name) or name: value for name, value in dequantize_checkpoint(directory).items()}


def figures(a: np.ndarray, b: np.ndarray) -> Figures:
    """Compare ``a`` [N, K] with the source's ``b``, block by block in a loop."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    floor = np.abs(b).max() / 16384
    worst, equal, blocks = 0.0, 0, 0
    for column in range(0, b.shape[1], 16):
        block = slice(column, column + 16)
        error, largest = np.abs(a[:, block] - b[:, block]).max(axis=1), np.abs(b[:, block]).max(axis=1)
        worst = max(worst, float((error / np.maximum(largest, floor)).max()))
        equal += int((error == 0).sum())
        blocks += len(error)
    norm = np.linalg.norm
    return Figures(float(norm(a - b) / norm(b)), float((a * b).sum() / (norm(a) * norm(b))), worst, equal, blocks)
