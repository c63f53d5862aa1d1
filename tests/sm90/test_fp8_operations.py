"""The w8a16 operation: executed in the emulator against fp64, planned, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.errors import ArchitectureError
from nvfp4_sgl.cutedsl_kernels.plan import Pin, every_key
from nvfp4_sgl.cutedsl_kernels.sm90.choose import H200_CLUSTERS, choose_gemm
from nvfp4_sgl.cutedsl_kernels.sm90.shape import MIN_STAGES, KernelShape
from nvfp4_sgl.cutedsl_kernels.w8a16 import operations
from nvfp4_sgl.cutedsl_kernels.w8a16.operand import Fp8TiledWeights
from nvfp4_sgl.cutedsl_kernels.warm_up import keys_for, smallest_call
from nvfp4_sgl.errors import OperandError, OperandValueError
from nvfp4_sgl.formats import fp8_block, mxfp8
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.weights.gemms import GemmSpec
from tests.sm90.support.products import random_tokens
from tests.sm100.support.launcher import EmulatedLauncher, emulated_operations
from tests.support.reference_gemms import DryLauncher, dry_gemms, reference_gemms

BF16 = torch.bfloat16


def matrix(*shape: int, seed: int) -> MxFp8Tensor:
    """Random weights with outliers, quantised in blocks of 128 × 128 of each matrix."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=random)
    return mxfp8.from_blocks(fp8_block.quantize_weight(values * torch.where(values.abs() > 2.5, 20.0, 1.0)))


@pytest.fixture
def emulated() -> Iterator[EmulatedLauncher]:
    with emulated_operations(name="sm_90a", gpu=H200_CLUSTERS) as launcher:
        yield launcher


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Within one rounding to bf16, beside what the fp32 sums of large terms lose."""
    assert torch.allclose(found.double(), expected, rtol=2.0**-8, atol=1e-5 * float(expected.abs().max()))


def test_product(emulated: EmulatedLauncher) -> None:
    weights, tokens = matrix(136, 192, seed=1), random_tokens(3, 192, seed=2)
    tiled = Fp8TiledWeights.of(weights)
    out = operations.product(tokens, tiled, dtype=torch.float32)
    expected = tokens.double() @ weights.dequantize().double().T
    assert out.dtype == torch.float32 and torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert_close(operations.product(tokens, tiled), expected)
    assert {key.shape.weights for key in emulated.keys} == {"fp8"}
    assert all(key.name.startswith("fp8_sm_90a_") for key in emulated.keys)


def test_the_first_rows_of_merged_weights(emulated: EmulatedLauncher) -> None:
    weights, tokens = matrix(264, 128, seed=5), random_tokens(3, 128, seed=6)
    tiled = Fp8TiledWeights.of(weights)
    assert torch.equal(operations.product(tokens, tiled.first(128)), operations.product(tokens, tiled)[:, :128])
    with pytest.raises(OperandValueError, match="multiple of 128 up to 264 of a single matrix, found 100 of 1"):
        tiled.first(100)


def test_groups_of_strided_rows(emulated: EmulatedLauncher) -> None:
    weights, tokens = matrix(2, 16, 64, seed=3), random_tokens(9, 3, 72, seed=4)[:, :2, :64]
    out = operations.product(tokens, Fp8TiledWeights.of(weights))
    for group in range(2):
        assert_close(out[:, group], tokens[:, group].double() @ weights.dequantize()[group].double().T)


def test_the_torch_stand_in_computes_the_same() -> None:
    """What tests of the decoder multiply with where there is no GPU."""
    weights, tokens = matrix(2, 136, 192, seed=3), random_tokens(5, 2, 192, seed=4)
    with reference_gemms("sm_90a"):
        out = operations.product(tokens, Fp8TiledWeights.of(weights), dtype=torch.float32)
    expected = torch.einsum("tgk,gfk->tgf", tokens.double(), weights.dequantize().double())
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_no_rows_launch_nothing() -> None:
    with dry_gemms("sm_90a") as dry:
        tiled = Fp8TiledWeights.of(matrix(16, 64, seed=1))
        assert operations.product(torch.empty(0, 64, dtype=BF16), tiled).shape == (0, 16)
    assert not dry.keys


def test_pinned_plans() -> None:
    tiled = Fp8TiledWeights.of(matrix(16, 512, seed=1))
    pin = Pin(token_tile=8, split_k=2)
    with dry_gemms("sm_90a", pin) as dry:
        operations.product(random_tokens(40, 512, seed=2), tiled)
    assert [key.shape for key in dry.keys] == [KernelShape(8, 2, weights="fp8")]
    assert set(dry.keys) <= set(keys_for(PRODUCTS, 1, 10.0, "sm_90a", H200_CLUSTERS, pin=pin))


# What is planned.

PRODUCTS = [
    GemmSpec("from x", 1536, 4096, output="fp32", kind="fp8"),
    GemmSpec("o_a", 1024, 4096, 8, kind="fp8"),
    GemmSpec("shared_experts.w2", 4096, 2048, kind="fp8"),
]


def test_the_warm_up_foresees_every_kernel() -> None:
    needed = set(keys_for(PRODUCTS, 600, 10.0, "sm_90a", H200_CLUSTERS))
    assert {key.shape.weights for key in needed} == {"fp8"}
    assert needed <= set(every_key("sm_90a", 10.0, ("bf16", "fp32")))
    with dry_gemms("sm_90a") as dry:
        for product in PRODUCTS:
            shape = (product.groups, -(-product.features // 128), product.k // 128, 16896)
            weights = Fp8TiledWeights(torch.empty(shape, dtype=torch.uint8), torch.ones(1), product.features, product.k)
            dtype = torch.float32 if product.output == "fp32" else BF16
            for tokens in (1, 7, 8, 9, 40, 64, 65, 200, 600):
                operations.product(torch.empty(tokens, product.groups, product.k, dtype=BF16), weights, dtype=dtype)
    assert set(dry.keys) <= needed


def test_kernels_of_a_library_or_of_sm100_are_none_of_these() -> None:
    others = [GemmSpec("bf16", 1024, 1024, kind="bf16"), GemmSpec("mxfp8", 1024, 1024, kind="mxfp8")]
    assert keys_for(others, 8, 10.0, "sm_90a", H200_CLUSTERS) == []
    assert keys_for(PRODUCTS, 8, 10.0, "sm_100a", H200_CLUSTERS) == []


def test_chosen_shapes_exist() -> None:
    for features, k in ((1536, 4096), (4096, 8192), (32768, 1024)):
        for tokens in (1, 16, 64, 512, 8192):
            shape = choose_gemm(features, k, tokens, 1, "bf16", H200_CLUSTERS, "fp8")
            assert shape.weights == "fp8" and shape.stages >= MIN_STAGES
    assert choose_gemm(32768, 1024, 8192, 1, "bf16", H200_CLUSTERS, "fp8").token_tile == 128


def test_the_smallest_call_of_a_kernel() -> None:
    shape = KernelShape(16, 4, "fp32", weights="fp8")
    with emulated_operations(name="sm_90a", gpu=H200_CLUSTERS) as launcher:
        key = next(key for key in every_key("sm_90a", 10.0, ("fp32",)) if key.shape == shape)
        call = smallest_call(key, torch.device("cpu"))
        call.out.fill_(float("nan"))
        launcher.launch(key, call, 1)
    assert not call.out.any()


# What is refused.

T, F, K, G = 24, 64, 128, 2


def tiles(matrices: int, features: int = F, k: int = K) -> Tensor:
    return torch.zeros(matrices, -(-features // 128), -(-k // 128), 16896, dtype=torch.uint8)


def call(**changed: Any) -> None:
    """A right call but for what is ``changed``."""
    right = {
        "tokens": torch.zeros(T, K, dtype=BF16),
        "weights": tiles(1),
        "ones": torch.ones(1),
        "out": torch.zeros(T, F, dtype=BF16),
    }
    torch.ops.nvfp4_sgl.w8a16_product(*(right | changed).values())


@pytest.fixture
def runner() -> Iterator[DryLauncher]:
    with dry_gemms("sm_90a") as dry:
        yield dry


def test_right_calls_are_launched(runner: DryLauncher) -> None:
    call()
    call(tokens=torch.zeros(T, G, K, dtype=BF16), weights=tiles(G), out=torch.zeros(T, G, F))
    assert len(runner.keys) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": torch.zeros(T, K)}, "tokens: expected dtype torch.bfloat16, found torch.float32"),
        ({"tokens": torch.zeros(T, 96, dtype=BF16)}, "tokens: expected K to be a positive multiple of 64"),
        ({"tokens": torch.zeros(K, dtype=BF16)}, r"tokens: expected shape \[rows, K\]"),
        (
            {"weights": torch.zeros(1, 1, 1, 9216, dtype=torch.uint8)},
            "weights: expected shape .1, 1, 1, 16896. = tiles of matrices of 64 features",
        ),
        ({"weights": tiles(2)}, "weights: expected 1 matrices, as tokens have groups, found 2"),
        ({"weights": tiles(1).view(torch.float8_e4m3fn)}, "weights: expected dtype torch.uint8"),
        ({"ones": torch.ones(1, F)}, r"alpha: expected shape \(1,\)"),
        ({"ones": torch.ones(1, device="meta")}, "ones: expected device cpu"),
        ({"out": torch.zeros(T, F, dtype=torch.float16)}, "out: expected dtype torch.bfloat16 or torch.float32"),
        ({"out": torch.zeros(T - 1, F, dtype=BF16)}, r"out: expected shape \(24, 64\)"),
        ({"tokens": torch.zeros(T * K + 1, dtype=BF16)[1:].view(T, K)}, "tokens: expected an address"),
    ],
)
def test_wrong_calls(changed: dict[str, Any], message: str, runner: DryLauncher) -> None:
    with pytest.raises(OperandError, match=message):
        call(**changed)
    assert not runner.keys


def test_another_gpu() -> None:
    with dry_gemms("sm_100a"), pytest.raises(ArchitectureError, match="expected sm_90a for bf16 activations"):
        call()


def test_the_operator_traces_on_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        call()
        with pytest.raises(OperandValueError, match="out: expected shape"):
            call(out=torch.zeros(T + 1, F, dtype=BF16))


def test_weights_of_another_shape() -> None:
    weights = matrix(16, 64, seed=1)
    with pytest.raises(OperandValueError, match=r"codes: expected shape \[F, K\] or \[G, F, K\]"):
        Fp8TiledWeights.of(MxFp8Tensor(weights.codes[None, None], weights.scale[None, None]))
    with pytest.raises(OperandValueError, match="K to be a positive multiple of 64"):
        Fp8TiledWeights.of(matrix(16, 96, seed=1))
