"""Weights as the kernels take them, from the checkpoint's: swizzled scales, gates and ups in turn, expert by expert."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.common.gates import interleave_gates
from nvfp4_sgl.cutedsl_kernels.sm100.shape import GATE_ROWS
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from nvfp4_sgl.formats.scale_layout import swizzle_128x4
from tests.sm100.support import products
from tests.sm100.support.operands import random_weights, scales

EXPERTS, FEATURES, K = 3, 80, 192
CPU = torch.device("cpu")


def poisoned(weights: Weights) -> Weights:
    """Room whose every byte is written before it is read, if the test is to pass."""
    weights.codes.fill_(0xAA)
    weights.block_scales.view(torch.uint8).fill_(0x7F)
    weights.scale.fill_(float("nan"))
    return weights


def test_gates_and_ups_alternate_by_16() -> None:
    plain = torch.arange(2 * 2 * 48).view(2, 2, 48, 1)
    found = interleave_gates(plain, GATE_ROWS)
    assert found.shape == (2, 96, 1)
    assert found[0, :34, 0].tolist() == [*range(16), *range(48, 64), 16, 17]
    assert torch.equal(found, products.interleave_gates(plain))


@pytest.mark.parametrize("features", [16, FEATURES, 128])
def test_gated_experts_one_by_one_are_those_at_once(features: int) -> None:
    """Whatever their order; an expert's gates and ups may come as views of larger tensors."""
    codes, block_scales, _ = random_weights(EXPERTS, 2, features, K)
    alpha = scales(EXPERTS, 2)
    whole = Weights.gated_experts(codes, block_scales, alpha)
    assert torch.equal(whole.codes, products.interleave_gates(codes))
    plain = products.interleave_gates(block_scales.view(torch.uint8))
    assert torch.equal(whole.block_scales.view(torch.uint8), swizzle_128x4(plain).flatten())
    assert torch.equal(whole.scale, alpha)
    single = poisoned(Weights.allocate_gated_experts(EXPERTS, features, K, CPU))
    wide = torch.zeros(2, features, K, dtype=torch.uint8)
    for expert in (2, 0, 1):
        wide[..., : K // 2] = codes[expert]
        single.put_gated_expert(expert, wide[..., : K // 2], block_scales[expert], alpha[expert])
    for name in ("codes", "block_scales", "scale"):
        assert torch.equal(*(getattr(one, name).view(torch.uint8) for one in (single, whole))), name


def test_experts_one_by_one_are_those_at_once() -> None:
    codes, block_scales, _ = random_weights(EXPERTS, FEATURES, K)
    alpha = scales(EXPERTS)
    whole = Weights.experts(codes, block_scales, alpha)
    single = poisoned(Weights.allocate_experts(EXPERTS, FEATURES, K, CPU))
    for expert in (1, 2, 0):
        single.put_expert(expert, codes[expert], block_scales[expert], alpha[expert])
    for name in ("codes", "block_scales", "scale"):
        assert torch.equal(*(getattr(one, name).view(torch.uint8) for one in (single, whole))), name
