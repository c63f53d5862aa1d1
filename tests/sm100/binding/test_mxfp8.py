"""The MXFP8 operations, from activations and a checkpoint's FP8 to results, with the launch in the emulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.mxfp8 import operations as ops
from nvfp4_sgl.cutedsl_kernels.mxfp8.operand import MxFp8Weights
from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import mxfp8
from nvfp4_sgl.formats.fp8_block import quantize_weight
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.rows import MxFp8Rows
from nvfp4_sgl.formats.scale_layout import swizzle_128x4
from tests.sm100.support.launcher import emulated_operations
from tests.sm100.support.operands import assert_allowed, fp64
from tests.sm100.support.products import Bounded, product, swiglu

LIMIT = 10.0


def weights_of(*shape: int, seed: int = 1) -> MxFp8Tensor:
    """Weights [..., F, K] as a checkpoint has them: FP8 in blocks of 128 by 128."""
    return mxfp8.from_blocks(quantize_weight(torch.randn(*shape, generator=torch.Generator().manual_seed(seed))))


def rows_of(x: Tensor, token_tile: int) -> tuple[MxFp8Rows, np.ndarray]:
    """Quantised rows [T, K] or [T, G, K], laid out by torch, and their values in fp64."""
    groups = x.shape[1] if x.dim() == 3 else 1
    tensor = mxfp8.quantize_rows(x.reshape(-1, x.shape[-1]))
    blocks = tensor.scale.view(len(x), groups, -1)
    plain = torch.nn.functional.pad(blocks, (0, -blocks.shape[-1] % 4)).flatten(1)
    rows = MxFp8Rows(tensor.codes.view(x.shape), swizzle_128x4(plain, token_tile), token_tile)
    return rows, fp64(tensor.dequantize()).reshape(x.shape)


def activations(*shape: int, seed: int = 2) -> Tensor:
    """bf16 with outliers of 100 times the rest."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x[..., ::37] *= 100
    return x.bfloat16()


def expected(tokens: np.ndarray, weights: Tensor) -> Bounded:
    return product(tokens, fp64(weights), mma_k=32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "features", "k"), [(1, 136, 416), (20, 72, 128), (130, 128, 64)])
def test_product(tokens: int, features: int, k: int, dtype: torch.dtype) -> None:
    weights = weights_of(features, k)
    rows, values = rows_of(activations(tokens, k), ops.token_tile_for(tokens))
    with emulated_operations() as runner:
        out = ops.product(rows, MxFp8Weights.of(weights), dtype=dtype)
    assert [key.shape.operands for key in runner.keys] == ["mxfp8"]
    assert_allowed(out, expected(values, weights.dequantize()))


def test_block_diagonal_product_whose_groups_fill_no_atom_of_scales() -> None:
    weights = weights_of(3, 72, 160)
    rows, values = rows_of(activations(9, 3, 160), ops.token_tile_for(9))
    with emulated_operations():
        out = ops.product(rows, MxFp8Weights.of(weights))
    for group in range(3):
        assert_allowed(out[:, group], expected(values[:, group], weights.dequantize()[group]))


def test_gate_up() -> None:
    weights = weights_of(2, 96, 128)
    rows, values = rows_of(activations(5, 128) / 64, ops.token_tile_for(5))
    with emulated_operations():
        out = ops.gate_up(rows, MxFp8Weights.gated(weights), LIMIT, dtype=torch.float32)
    gate, up = (expected(values, half) for half in weights.dequantize())
    assert_allowed(out, swiglu(gate, up, LIMIT))


def test_no_rows_launch_nothing() -> None:
    rows = MxFp8Rows.allocate(0, 64, 8, "cpu")
    with emulated_operations() as runner:
        assert ops.product(rows, MxFp8Weights.of(weights_of(8, 64))).shape == (0, 8)
    assert not runner.keys


def refused() -> dict[str, tuple[str, Callable[[], object]]]:
    rows, weights = MxFp8Rows.allocate(4, 64, 8, "cpu"), weights_of(16, 64)
    operand = MxFp8Weights.of(weights)
    other_tile = MxFp8Rows(rows.codes, torch.cat([rows.block_scales] * 2), 8)
    return {
        "K of 48": ("expected K", lambda: MxFp8Weights.of(weights_of(16, 48))),
        "another K": ("mxfp8_product: weights", lambda: ops.product(rows, MxFp8Weights.of(weights_of(16, 96)))),
        "scales for other rows": ("mxfp8_product: token_scales", lambda: ops.product(other_tile, operand)),
        "seven features": ("mxfp8_product: out", lambda: ops.product(rows, MxFp8Weights.of(weights_of(7, 64)))),
        "eight gates": ("I", lambda: MxFp8Weights.gated(weights_of(2, 8, 64))),
        "rows of one half": ("mxfp8_gate_up: weights", lambda: ops.gate_up(rows, operand, LIMIT)),
        "a limit of zero": ("limit", lambda: ops.gate_up(rows, operand, 0.0)),
        "fp16 out": ("mxfp8_product: out", lambda: ops.product(rows, operand, dtype=torch.float16)),
    }


@pytest.mark.parametrize("what", refused())
def test_what_does_not_fit_is_refused(what: str) -> None:
    words, call = refused()[what]
    with emulated_operations(), pytest.raises(OperandError, match=words):
        call()
