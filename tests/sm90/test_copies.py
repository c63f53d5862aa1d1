"""Dense Hopper kernels that write their result to several tensors at once, executed in the emulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels import plan, warm_up
from nvfp4_sgl.cutedsl_kernels.common.call import BoundCall
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.plan import Pin
from nvfp4_sgl.cutedsl_kernels.sm90.call import Call
from nvfp4_sgl.cutedsl_kernels.sm90.choose import H200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.sm90.shape import COPIES, KernelShape
from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.nvfp4 import quantize_weight
from nvfp4_sgl.weights.gemms import GemmSpec
from tests.sm90.support.products import ProductCase, compile_shape, product, random_tokens, run
from tests.sm100.emulator import Compiled, EmulatorError, Options, Statistics
from tests.sm100.support.launcher import emulated_operations
from tests.sm100.support.mutants import without_each
from tests.support.reference_gemms import dry_gemms, reference_gemms

BF16 = torch.bfloat16
NOT_THERE = -1
"""0xFFFF, a NaN that no kernel writes; whoever waits for a result fills its memory with it."""
GUARD_ROWS = 3
"""Rows behind the last, which no kernel may write."""


def blank(case: ProductCase, count: int) -> list[Tensor]:
    """Memory for so many results, as int16; longer than they are."""
    shape = case.tokens + GUARD_ROWS, case.features + case.wider
    return [torch.full(shape, NOT_THERE, dtype=torch.int16) for _ in range(count)]


def copied(case: ProductCase, copies: int, **changed: Any) -> tuple[Call, list[Tensor]]:
    """A case's call with copies, and the memory of its results: that of ``out`` first."""
    call, _ = case.build()
    memory = blank(case, 1 + copies)
    out, *others = (bits.view(BF16)[: case.tokens, : case.features] for bits in memory)
    shape = replace(case.shape, copies=copies)
    return replace(call, shape=shape, tokens=call.tokens[:, 0], out=out, copies=others, **changed), memory


def check(
    case: ProductCase, copies: int, options: Options | None = None, clusters: int = 1, compiled: Compiled | None = None
) -> Statistics:
    """Compare all memory of all results with that of a call without copies, and this with the fp64 product."""
    plain, (expected,) = copied(case, 0)
    run(plain, clusters=clusters)
    exact = product(plain.tokens, case.build()[1].values(0)).scaled(plain.alpha[0].double().numpy())
    wrong = ~exact.allows(plain.out)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong, first {np.argwhere(wrong)[0]}"
    call, found = copied(case, copies)
    statistics = run(call, options, clusters, compiled)
    for i, bits in enumerate(found):
        differing = bits != expected
        assert not differing.any(), f"tensor {i}: {differing.sum()} values differ, first {differing.nonzero()[0]}"
    assert (expected[: case.tokens, : case.features] != NOT_THERE).all()
    assert (expected[case.tokens :] == NOT_THERE).all() and (expected[:, case.features :] == NOT_THERE).all()
    return statistics


CASES = [
    (ProductCase(KernelShape(8), tokens=1, features=200, k=576), 1),
    (ProductCase(KernelShape(8), tokens=7, features=136, k=64, wider=24), 3),
    (ProductCase(KernelShape(8, split_k=2), tokens=8, features=72, k=320, wider=8), 1),
    (ProductCase(KernelShape(8, split_k=3, max_ctas=1), tokens=5, features=136, k=640), 7),
    (ProductCase(KernelShape(8, split_k=8), tokens=8, features=136, k=1024), 1),
    (ProductCase(KernelShape(16), tokens=16, features=136, k=128, wider=16), 1),
    (ProductCase(KernelShape(16, split_k=4), tokens=10, features=136, k=576, wider=8), 3),
    (ProductCase(KernelShape(32), tokens=17, features=72, k=64, wider=8), 3),
    (ProductCase(KernelShape(32, split_k=2), tokens=30, features=136, k=256), 1),
    (ProductCase(KernelShape(64), tokens=70, features=72, k=64, wider=8), 1),
    (ProductCase(KernelShape(64, split_k=2), tokens=60, features=72, k=256), 3),
    (ProductCase(KernelShape(64, split_k=2), tokens=9, features=24, k=256), 7),
    (ProductCase(KernelShape(128), tokens=130, features=24, k=64, wider=8), 1),
    (ProductCase(KernelShape(256), tokens=250, features=16, k=64), 1),
]


def name(value: object) -> str:
    if not isinstance(value, ProductCase):
        return f"{value} copies"
    return f"{value.tokens}x{value.features}x{value.k} by {value.shape.split_k}"


@pytest.mark.parametrize(("case", "copies"), CASES, ids=name)
def test_every_tensor_gets_the_bits_of_a_call_without_copies(case: ProductCase, copies: int) -> None:
    check(case, copies)


STORES = {
    "buffers in turn": ProductCase(KernelShape(64), tokens=100, features=272, k=64),
    "K split": ProductCase(KernelShape(16, split_k=2), tokens=16, features=272, k=256),
}
"""Several tiles for a cluster, so that each buffer is stored again and again."""
MODES = {
    "random": Options("random", 1),
    "stores starved": Options("starved", 3, "tma_store"),
    "stores to the cluster starved": Options("starved", 6, "st_async"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", STORES)
def test_results_do_not_depend_on_timing(by: str, mode: str) -> None:
    check(STORES[by], 1, MODES[mode])


def test_a_copy_costs_its_stores_and_nothing_else() -> None:
    case = ProductCase(KernelShape(8), tokens=8, features=256, k=384)
    plain, several = (check(case, copies).engine_bytes for copies in (0, 3))
    assert several["tma_store"] == 4 * plain["tma_store"] == 4 * 8 * 256 * 2
    assert several["tma_load"] == plain["tma_load"]


@pytest.mark.parametrize("by", STORES)
def test_every_dropped_store_is_noticed(by: str) -> None:
    case = STORES[by]
    kernel = compile_shape(replace(case.shape, copies=1))
    mutants = list(without_each(kernel, r"cp\.async\.bulk\.tensor\.3d\.global\.shared::cta"))
    assert len(mutants) == 2 * case.shape.chunks
    for where, mutant in mutants:
        with pytest.raises((AssertionError, EmulatorError)):
            check(case, 1, compiled=mutant)
            pytest.fail(where)


# What a result can be.

NAN_BITS = (0xFFFF, 0x7FFF, 0xFF81, 0x7F81, 0xFFC0)
"""NaNs of bf16: of either sign, quiet and signalling."""


@pytest.mark.parametrize("copies", [0, 1])
@pytest.mark.parametrize("shape", [KernelShape(8), KernelShape(16, split_k=2), KernelShape(32)], ids=str)
def test_no_result_is_the_nan_of_all_ones(shape: KernelShape, copies: int) -> None:
    """Whoever polls for a result takes 0xFFFF for one that has not arrived."""
    case = ProductCase(shape, tokens=8, features=24, k=256)
    call, memory = copied(case, copies)
    bits = call.tokens.view(torch.int16)
    bits[:5, 3] = torch.tensor(NAN_BITS, dtype=torch.int32).to(torch.int16)
    call.tokens[5, 7], call.tokens[6, :2] = float("-inf"), torch.tensor([float("inf"), float("-inf")])
    # Of the last row, scales make a NaN of either sign, or of infinity times zero.
    ones = torch.tensor([-1, 0x7FFFFFFF, -4194303, 0x7F800001], dtype=torch.int64).to(torch.int32).view(torch.float32)
    call.alpha[0, :4], call.alpha[0, 4], call.alpha[0, 5] = ones, 0.0, -0.0
    run(call)
    for found in memory:
        values = found.view(BF16)[:8, :24]
        assert values[:5].isnan().all() and values[5, 4:6].isnan().all() and values[7, :4].isnan().all()
        assert values[6].isnan().any() and values[7, 4:].isfinite().all()
        assert (found[:8, :24] != NOT_THERE).all() and (found[8:] == NOT_THERE).all()
        assert set(found[:8, :24][values.isnan()].tolist()) == {0x7FFF}


# Through the operation.


def matrix(features: int, k: int) -> TiledWeights:
    random = torch.Generator().manual_seed(5)
    values = torch.randn(features, k, generator=random)
    weights = quantize_weight(values * torch.where(torch.rand(features, k, generator=random) < 0.01, 20.0, 1.0))
    return TiledWeights.dense(weights.packed, weights.block_scale, weights.global_scale)


def results(count: int, tokens: int, features: int) -> list[Tensor]:
    """Rows of wider matrices, poisoned."""
    return [
        torch.full((tokens, features + 8), NOT_THERE, dtype=torch.int16).view(BF16)[:, :features] for _ in range(count)
    ]


def test_each_call_writes_its_own_tensors() -> None:
    """The second call looks like the first, and is not planned again."""
    weights, tokens = matrix(136, 192), random_tokens(3, 192, seed=2)
    with emulated_operations(name="sm_90a", gpu=H200_CLUSTERS) as runner:
        expected = operations.product(tokens, weights)
        for _ in range(2):
            out, *copies = results(4, 3, 136)
            assert operations.product(tokens, weights, out=out, copies=copies) is out
            assert all(torch.equal(found, expected) for found in (out, *copies))
    assert [key.shape.copies for key in runner.keys] == [0, 3, 3]
    shapes = [key.shape for key in runner.keys if isinstance(key.shape, KernelShape)]
    assert {replace(shape, copies=0) for shape in shapes} == {shapes[0]}


def test_copies_of_other_looks_are_checked_again() -> None:
    weights, tokens = matrix(136, 192), random_tokens(3, 192, seed=2)
    out, *right = results(4, 3, 136)
    with dry_gemms("sm_90a") as dry:
        operations.product(tokens, weights, out=out, copies=right)
        with pytest.raises(OperandValueError, match=r"copies\[2\]: expected strides"):
            operations.product(tokens, weights, out=out, copies=[*right[:2], torch.empty(3, 136, dtype=BF16)])
        with pytest.raises(OperandValueError, match="copies: expected one of"):
            operations.product(tokens, weights, out=out, copies=right[:2])
    assert len(dry.keys) == 1


def test_the_torch_stand_in_writes_copies() -> None:
    weights, tokens = matrix(136, 192), random_tokens(3, 192, seed=2)
    out, copy = results(2, 3, 136)
    with reference_gemms("sm_90a"):
        operations.product(tokens, weights, out=out, copies=[copy])
    assert torch.equal(copy, out) and not out.isnan().any()


def test_traced_calls_keep_their_copies() -> None:
    weights, tokens = matrix(136, 192), random_tokens(3, 192, seed=2)

    def both(out: Tensor, copy: Tensor) -> Tensor:
        operations.product(tokens, weights, out=out, copies=[copy])
        return out + copy

    torch._dynamo.reset()
    with reference_gemms("sm_90a"):
        expected = operations.product(tokens, weights)
        out, copy = results(2, 3, 136)
        found = torch.compile(both, fullgraph=True, backend="aot_eager")(out, copy)
    assert torch.equal(found, 2 * expected) and torch.equal(copy, expected)


# Plans and keys.

O_B = GemmSpec("o_b", 4096, 2048)


@pytest.mark.parametrize("copies", COPIES)
def test_the_warm_up_foresees_every_kernel(copies: int) -> None:
    needed = warm_up.keys_for([O_B], 300, 10.0, "sm_90a", H200_CLUSTERS, copies=copies)
    assert {key.shape.copies for key in needed} == {copies}
    weights = TiledWeights(torch.empty(1, 32, 16, 9216, dtype=torch.uint8), torch.ones(1, 4096), 4096, 2048)
    with dry_gemms("sm_90a") as dry:
        for tokens in (1, 8, 9, 40, 64, 65, 300):
            out, *others = torch.empty(1 + copies, tokens, 4096, dtype=BF16).unbind()
            operations.product(torch.empty(tokens, 2048, dtype=BF16), weights, out=out, copies=others)
    assert len(dry.keys) == 7 and set(dry.keys) <= set(needed)


def test_the_choice_does_not_depend_on_copies() -> None:
    for pin in (None, Pin(token_tile=16, split_k=2)):
        for tokens in (1, 16, 64, 300):
            plain, three = (
                plan.plan_w4a16(4096, 2048, tokens, 1, "bf16", H200_CLUSTERS, copies=copies, pin=pin)
                for copies in (0, 3)
            )
            assert three == replace(plain, copies=3)


def test_a_library_of_every_kernel_has_none_with_copies() -> None:
    assert {key.shape.copies for key in plan.every_w4a16_key(10.0)} == {0}


def test_copies_are_for_hoppers_dense_kernels() -> None:
    with pytest.raises(OperandValueError, match="copies: expected 0 for sm_100a, found 1"):
        warm_up.keys_for([O_B], 8, 10.0, "sm_100a", H200_CLUSTERS, copies=1)
    others: list[dict[str, Any]] = [
        {"groups": 8}, {"gated": True}, {"output": "fp32"}, {"kind": "fp8"}, {"groups": 9, "experts_per_token": 2},
    ]  # fmt: skip
    for other in others:
        with pytest.raises(OperandValueError, match="copies: expected 0 but for dense GEMMs of NVFP4 weights"):
            warm_up.keys_for([O_B, replace(O_B, **other)], 8, 10.0, "sm_90a", H200_CLUSTERS, copies=1)
    with pytest.raises(ValueError, match=r"copies: expected one of \(0, 1, 3, 7\), found 2"):
        KernelShape(8, copies=2)
    wrong: list[dict[str, Any]] = [
        {"output": "fp32"}, {"grouped": True}, {"grouped": True, "gated": True}, {"weights": "fp8"},
    ]  # fmt: skip
    for fields in wrong:
        with pytest.raises(ValueError, match="copies: expected 0 but for dense NVFP4 kernels with bf16 output, found"):
            KernelShape(8, **fields, copies=1)


def test_kernels_of_other_copies_have_other_names() -> None:
    assert len({KernelKey("sm_90a", KernelShape(8, copies=copies)).name for copies in COPIES}) == len(COPIES)


def test_warm_up_runs_kernels_with_copies() -> None:
    keys = [KernelKey("sm_90a", KernelShape(8, split_k=2, copies=7))]
    with emulated_operations(name="sm_90a", gpu=H200_CLUSTERS) as runner:
        warm_up.warm_up(keys, torch.device("cpu"))
    assert runner.keys == keys


def test_a_call_has_the_copies_of_its_shape() -> None:
    call, _ = copied(CASES[0][0], 1)
    with pytest.raises(ValueError, match="copies: expected 1, found 0"):
        replace(call, copies=[])
    operands = {"tokens": call.tokens, "weights": call.weights, "alpha": call.alpha, "out": call.out}
    with pytest.raises(ValueError, match="copies: expected the operand copies"):
        BoundCall(call, 1, operands | {"copies": list(call.copies)})


def test_copies_need_an_out_to_be_like() -> None:
    with dry_gemms("sm_90a") as dry, pytest.raises(OperandValueError, match="out: expected a tensor for 1 copies"):
        operations.product(random_tokens(3, 192, seed=2), matrix(136, 192), copies=results(1, 3, 136))
    assert not dry.keys
