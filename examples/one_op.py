"""One op: a GEMM with an NVFP4 weight, in both modes, beside fp64 of the same values.

    python examples/one_op.py

Needs torch alone of the pinned environment; runs on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.formats.nvfp4 import quantize_weight
from nvfp4_sgl.ops.linear import PreparedWeight, linear
from nvfp4_sgl.ops.modes import ActivationMode

TOKENS, FEATURES, COLUMNS = 7, 64, 256


def relative_rms(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences over that of the expected values."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def main() -> dict[str, float]:
    """Print and return what quantising the weight, and the activations as well, costs in relative RMS."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(FEATURES, COLUMNS, generator=generator)
    x = torch.randn(TOKENS, COLUMNS, generator=generator)
    x[:, 5] *= 50  # activations have outliers

    packed = quantize_weight(matrix)  # codes, a scale for 16 columns, one for the matrix
    # What multiplies: codes times block scales, transposed; the global scale waits for the epilogue.
    weight = PreparedWeight(packed.unscaled().t().contiguous(), packed.global_scale.expand(FEATURES))
    stored = packed.unscaled().double() * packed.global_scale.double()
    errors = {"stored weight against the original": relative_rms(stored, matrix.double())}
    for mode in ActivationMode:
        y = linear(x, weight, mode)
        errors[f"{mode.value} GEMM against fp64 of the stored weight"] = relative_rms(
            y.double(), x.double() @ stored.t()
        )
    for what, error in errors.items():
        print(f"{what:<52} {error:.2e}")
    return errors


if __name__ == "__main__":
    main()
