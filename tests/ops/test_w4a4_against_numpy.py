"""Products with quantised activations against an fp64 NumPy calculation that shares no code with the package."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.formats import fp8_block
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor, quantize_weight
from nvfp4_sgl.ops.linear import grouped_linear, linear
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.ops.moe import expert_mlp, routed_experts
from nvfp4_sgl.targets.reference.projections import working_copy
from tests.support import numpy_nvfp4 as reference

ml_dtypes = pytest.importorskip("ml_dtypes")

W4A4 = ActivationMode.W4A4


def random(shape: tuple[int, ...], seed: int, outlier: float = 100.0) -> torch.Tensor:
    """Normals with outliers, one all-zero row, and one row so uneven that block scales underflow."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.002] *= outlier
    if len(shape) > 1 and shape[-2] > 3:
        x[..., 1, :] = 0
        x[..., 2, :] *= 1e-7
        x[..., 2, 5] = 1e4
    return x


def nvfp4_matrix(shards: list[torch.Tensor], scales: list[float]) -> NvFp4Tensor:
    """Shards [..., N, K] stacked by rows, each with a global scale of its own."""
    parts = [quantize_weight(w, torch.tensor(s)) for w, s in zip(shards, scales, strict=True)]
    return NvFp4Tensor(
        torch.cat([p.packed for p in parts], dim=-2),
        torch.cat([p.block_scale.view(torch.uint8) for p in parts], dim=-2).view(torch.float8_e4m3fn),
        torch.cat([p.global_scale.expand(p.packed.shape[:-1]) for p in parts], dim=-1),
    )


def weight_values(matrix: NvFp4Tensor) -> np.ndarray:
    """fp64 weight, global scales included."""
    values = reference.dequantize(matrix.packed.numpy(), matrix.block_scale.view(torch.uint8).numpy())
    return values * matrix.global_scale.numpy().astype(np.float64)[..., None]


def close(ours: torch.Tensor, expected: np.ndarray) -> None:
    """Equal up to fp32 accumulation: 1e-5 of each row's magnitude."""
    assert torch.isfinite(ours).all()
    bound = 1e-5 * np.abs(expected).max(-1, keepdims=True) + 1e-30
    assert (np.abs(ours.numpy() - expected) <= bound).all()


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_linear_with_shards_of_different_global_scales(tokens):
    x = random((tokens, 256), seed=tokens)
    matrix = nvfp4_matrix([random((n, 256), seed=n) / 16 for n in (48, 16, 80)], [1e-4, 7.3e-4, 3e-5])
    values, row_scale = reference.quantize_rows(x.numpy())
    expected = row_scale.astype(np.float64)[:, None] * (values @ weight_values(matrix).T)
    close(linear(x, working_copy(matrix), W4A4), expected)
    unquantised = linear(x, working_copy(matrix), ActivationMode.W4A16).numpy()
    assert np.abs(unquantised - x.numpy().astype(np.float64) @ weight_values(matrix).T).max() < 1e-3
    assert np.abs(unquantised - expected).max() > 1e-2


def test_grouped_linear_scales_each_token_and_group():
    x = random((5, 3, 128), seed=1)
    x[:, 1] *= 50
    matrix = nvfp4_matrix([random((3, 32, 128), seed=2) / 11], [2e-4])
    expected = np.stack(
        [
            (lambda q: q[1].astype(np.float64)[:, None] * (q[0] @ w.T))(reference.quantize_rows(x[:, g].numpy()))
            for g, w in enumerate(weight_values(matrix))
        ],
        axis=1,
    )
    close(grouped_linear(x, working_copy(matrix), W4A4), expected)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-np.maximum(x, -80)))


def expected_mlp(x: np.ndarray, w13: np.ndarray, w2: np.ndarray, hidden: np.ndarray | None = None) -> np.ndarray:
    values, row_scale = reference.quantize_rows(x)
    gate, up = np.split(row_scale.astype(np.float64)[:, None] * (values @ w13.T), 2, axis=-1)
    hidden = silu(np.minimum(gate, 10)) * np.clip(up, -10, 10)
    values, row_scale = reference.quantize_rows(hidden.astype(np.float32), float(np.float32(100 / 2688)))
    return row_scale.astype(np.float64)[:, None] * (values @ w2.T)


def test_expert_requantises_the_swiglu_output_with_the_constant_scale():
    x = random((9, 128), seed=3, outlier=5.0)
    w13 = nvfp4_matrix([random((64, 128), seed=4), random((64, 128), seed=5)], [5e-4, 9.7e-4])
    w2 = nvfp4_matrix([random((128, 64), seed=6) / 8], [3e-4])
    ours = expert_mlp(x, working_copy(w13), working_copy(w2), 10.0, W4A4, torch.float32)
    expected = expected_mlp(x.numpy(), weight_values(w13), weight_values(w2))
    # A last-bit difference before the second quantisation may move one code; it stays a rare, bounded event.
    scale = np.abs(expected).max(-1, keepdims=True) + 1e-30
    wrong = np.abs(ours.numpy() - expected) > 1e-5 * scale
    assert wrong.any(-1).mean() <= 0.25
    assert (np.abs(ours.numpy() - expected) <= 0.05 * scale).all()


def test_routed_experts_weigh_and_sum():
    experts, tokens = 4, 13
    x = random((tokens, 128), seed=7, outlier=5.0)
    w13 = nvfp4_matrix([random((experts, 32, 128), seed=8), random((experts, 32, 128), seed=9)], [5e-4, 2e-4])
    w2 = nvfp4_matrix([random((experts, 128, 32), seed=10) / 8], [3e-4])
    # Expert 2 gets no token, expert 0 gets most.
    chosen = torch.tensor([[0, 1 if t % 3 else 3] for t in range(tokens)])
    weights = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(11))
    ours = routed_experts(x, chosen, weights, working_copy(w13), working_copy(w2), 10.0, W4A4)
    w13_values, w2_values = weight_values(w13), weight_values(w2)
    expected = np.zeros((tokens, 128))
    for token in range(tokens):
        for slot in range(2):
            e = int(chosen[token, slot])
            y = expected_mlp(x[token : token + 1].numpy(), w13_values[e], w2_values[e])[0]
            expected[token] += float(weights[token, slot]) * y
    scale = np.abs(expected).max(-1, keepdims=True) + 1e-30
    wrong = np.abs(ours.numpy() - expected) > 1e-5 * scale
    assert wrong.any(-1).mean() <= 0.25
    assert (np.abs(ours.numpy() - expected) <= 0.05 * scale).all()


def mxfp8_values(x: torch.Tensor) -> np.ndarray:
    """fp64 values of activations in MXFP8: the least power of two for each 32 that keeps their maximum within 448."""
    blocks = x.numpy().astype(np.float64).reshape(-1, x.shape[-1] // 32, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    exponent = np.where(amax == 0, -127.0, np.ceil(np.log2(np.maximum(amax, 2.0**-100) / 448)))
    codes = np.ldexp(blocks, -exponent.astype(int)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.ldexp(codes, exponent.astype(int)).reshape(x.shape)


@pytest.mark.parametrize("groups", [1, 3])
def test_fp8_weights_meet_activations_in_mxfp8(groups):
    x = random((9, groups, 256), seed=4)
    weight = fp8_block.quantize_weight(random((groups, 48, 256), seed=5) / 16).dequantize()
    expected = np.einsum("tgk,gnk->tgn", mxfp8_values(x), weight.numpy().astype(np.float64))
    prepared = working_copy(weight, Storage.FP8)
    close(grouped_linear(x, prepared, W4A4), expected)
    if groups == 1:
        close(linear(x[:, 0], working_copy(weight[0], Storage.FP8), W4A4), expected[:, 0])
    for other in (grouped_linear(x, prepared, ActivationMode.W4A16), grouped_linear(x, working_copy(weight), W4A4)):
        assert np.abs(other.numpy() - expected).max() > 1e-2, "only w4a4 mode, and only such weights, quantise"


def test_a_shared_expert_in_fp8():
    """Its hidden rows are rounded to the model dtype, then quantised like any activation."""
    x = random((5, 128), seed=6)
    w13 = fp8_block.quantize_weight(random((128, 128), seed=7, outlier=1) / 8).dequantize()
    w2 = fp8_block.quantize_weight(random((128, 64), seed=8, outlier=1) / 8).dequantize()
    gate, up = np.split(mxfp8_values(x) @ w13.numpy().astype(np.float64).T, 2, axis=1)
    hidden = torch.from_numpy(silu(np.minimum(gate, 10.0)) * np.clip(up, -10.0, 10.0)).float()
    expected = mxfp8_values(hidden) @ w2.numpy().astype(np.float64).T
    copies = working_copy(w13, Storage.FP8), working_copy(w2, Storage.FP8)
    found = expert_mlp(x, *copies, 10.0, W4A4, torch.float32)
    # A hidden value next to a tie may round to the other side: a sixteenth of it.
    assert np.median(np.abs(found.numpy() - expected)) <= 1e-5 * np.abs(expected).max()
    assert np.abs(found.numpy() - expected).max() <= 1e-2 * np.abs(expected).max()
