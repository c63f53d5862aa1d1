"""Products whose result tells in which order the slices of K were added."""

from __future__ import annotations

import numpy as np
import torch

from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.support.products import RandomOperand, poisoned, poisoned_workspace, swizzle_rows

EXPONENTS = (7, -3, 7, -3, 6, -4, 7, 0)
"""Exponents of the block scales in each slice: large sums that cancel, with small ones in between."""


def _operand(rows: int, tile_k: int, slices: int, seed: int) -> RandomOperand:
    """All codes, and in each slice of K one block scale, a power of two: sums of a slice are exact in fp32."""
    operand = RandomOperand.make(1, rows, tile_k * slices, seed)
    powers = torch.tensor([(exponent + 7) << 3 for exponent in EXPONENTS[:slices]], dtype=torch.uint8)
    scales = powers.repeat_interleave(tile_k // 16).expand(1, rows, -1).contiguous()
    return RandomOperand(operand.packed, scales)


def sliced_product(shape: KernelShape, slices: int, tokens: int, features: int) -> tuple[Call, np.ndarray]:
    """A call without scales of its own, a stage of K a slice, and the slices' sums.

    Args:
        shape: with fp32 output.
        slices: at most ``len(EXPONENTS)``.

    Returns:
        The call, ``out`` poisoned, and fp32 [slices, tokens, features], exact.
    """
    weights, rows = (_operand(count, shape.tile_k, slices, seed) for count, seed in ((features, 1), (tokens, 2)))
    call = Call(
        shape=shape,
        weights=weights.packed,
        weight_scales=weights.swizzled(),
        tokens=rows.packed.transpose(0, 1).contiguous(),
        token_scales=swizzle_rows(rows.scales[0], shape.token_tile),
        out=poisoned(tokens, 1, features, output="fp32"),
        row_scale=torch.ones(tokens, 1),
        alpha=torch.ones(1, features),
        workspace=poisoned_workspace(shape),
    )
    parts = [values.reshape(len(values), slices, shape.tile_k) for values in (rows.values(0), weights.values(0))]
    exact = np.einsum("tsk,fsk->stf", *parts)
    sums = exact.astype(np.float32)
    assert np.array_equal(sums, exact)
    return call, sums


def added(sums: np.ndarray) -> np.ndarray:
    """fp32 sums, added one after the other."""
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total
