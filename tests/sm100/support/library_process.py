"""Run in a process of its own: load a library of kernels, and run an operation with its code in the emulator.

``python -m tests.sm100.support.library_process FOLDER``: prints the largest error relative to the largest value.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from nvfp4_sgl.cutedsl_kernels.common.native import NativeKernel
from nvfp4_sgl.cutedsl_kernels.compiled import KernelCache, KernelKey
from nvfp4_sgl.cutedsl_kernels.library import Library
from nvfp4_sgl.cutedsl_kernels.w4a4 import operations as ops
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from tests.sm100.emulator.host import Compiled, runtime_library
from tests.sm100.support.entries import compile_key
from tests.sm100.support.launcher import emulated_operations
from tests.sm100.support.operands import RandomRows, expected_product, random_weights, scales

SHAPE = (4, 64, 128)
"""Rows, features, K of the operation that the library can run."""


def main(folder: Path) -> None:
    library = Library(folder, runtime=runtime_library(), device=0)
    kernels = KernelCache(library, compile_missing=False)

    def from_library(key: KernelKey) -> Compiled:
        """The library's host code; the emulator needs the PTX, which a library does not hold."""
        native: NativeKernel = kernels.get(key)
        return Compiled(native, compile_key(key).ptx)

    count, features, k = SHAPE
    rows = RandomRows.make(count, k, ops.token_tile_for(count))
    codes, block_scales, values = random_weights(features, k)
    weights = Weights.dense(codes, block_scales, scales(features))
    with emulated_operations(compile=from_library):
        out = ops.product(rows.rows, weights, dtype=torch.float32)
    expected = expected_product(rows.values(), values.values(0), rows.rows.scale, weights.scale).values
    print(np.abs(out.double().numpy() - expected).max() / np.abs(expected).max())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
