"""Products of the SM100 kernels with modelled time."""

from __future__ import annotations

from dataclasses import replace

import torch

from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Options, Timeline, TimingModel
from tests.sm100.support.products import RandomOperand, run, swizzle_rows


def product(shape: KernelShape, features: int, k: int, rows: int) -> Call:
    """One product, or with a gated shape one of a gate and an up matrix, into bf16."""
    weights, tokens = RandomOperand.make(shape.halves, features, k, 1), RandomOperand.make(1, rows, k, 2)
    scales = swizzle_rows(tokens.scales[0], shape.token_tile)
    out = torch.zeros(rows, features, dtype=torch.bfloat16)
    alpha = torch.ones(2 if shape.gated else features)
    return Call(shape, weights.packed, weights.swizzled(), tokens.packed[0], scales, out, torch.ones(rows), alpha)


def timeline(
    shape: KernelShape,
    features: int,
    k: int,
    rows: int,
    model: TimingModel | None = None,
    options: Options | None = None,
) -> Timeline:
    """The times of one persistent cluster that does all tiles of a product."""
    epilogue = Epilogue(limit=10.0 if shape.gated else None)
    options = replace(options or Options(), timing=model or TimingModel())
    return run(product(shape, features, k, rows), epilogue, options).timelines[0]
