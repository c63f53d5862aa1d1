"""The public operations, from operands to results, with the launch in the emulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.w4a4 import operations as ops
from nvfp4_sgl.cutedsl_kernels.w4a4.operand import Weights
from nvfp4_sgl.formats.nvfp4 import quantize_rows, swiglu_row_scale
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.formats.scale_layout import layout_tile, scale_bytes
from tests.sm100.support.launcher import emulated_operations
from tests.sm100.support.operands import (
    RandomRows,
    assert_allowed,
    expected_product,
    fp64,
    random_weights,
    scales,
)
from tests.sm100.support.products import swiglu, unswizzle_rows

LIMIT = 10.0


def test_product_writes_into_the_same_buffer_again() -> None:
    """As a captured graph does: only the contents change between the calls."""
    tile = ops.token_tile_for(5)
    rows = RandomRows.make(5, 192, tile)
    codes, block_scales, values = random_weights(136, 192)
    weights = Weights.dense(codes, block_scales, scales(136))
    out = torch.empty(5, 136, dtype=torch.bfloat16)
    with emulated_operations() as runner:
        assert ops.product(rows.rows, weights, out=out) is out
        assert_allowed(out, expected_product(rows.values(), values.values(0), rows.rows.scale, weights.scale))
        other = RandomRows.make(5, 192, tile, seed=7)
        for target, source in ((rows.rows.codes, other.rows.codes), (rows.rows.scale, other.rows.scale)):
            target.copy_(source)
        rows.rows.block_scales.view(torch.uint8).copy_(other.rows.block_scales.view(torch.uint8))
        ops.product(rows.rows, weights, out=out)
    assert_allowed(out, expected_product(other.values(), values.values(0), other.rows.scale, weights.scale))
    assert len(set(runner.keys)) == 1


def test_product_of_one_scale_in_fp32_into_a_wider_row() -> None:
    """A weight with one global scale; an output with padding between rows, and features that no tile divides."""
    rows = RandomRows.make(20, 64, 32)
    codes, block_scales, values = random_weights(132, 64)
    out = torch.full((20, 140), 7.0)
    weights = Weights.dense(codes, block_scales, torch.tensor(2.0**-9))
    with emulated_operations():
        ops.product(rows.rows, weights, out=out[:, :132])
    assert_allowed(out[:, :132], expected_product(rows.values(), values.values(0), rows.rows.scale, 2.0**-9))
    assert (out[:, 132:] == 7.0).all()


def test_rows_quantised_for_a_wide_tile_meet_a_product_with_few() -> None:
    rows = RandomRows.make(3, 64, 128)
    codes, block_scales, values = random_weights(64, 64)
    weights = Weights.dense(codes, block_scales, scales(64))
    with emulated_operations() as runner:
        out = ops.product(rows.rows, weights)
    assert layout_tile(runner.keys[0].shape.token_tile) == 128
    assert_allowed(out, expected_product(rows.values(), values.values(0), rows.rows.scale, weights.scale))


def test_grouped_product_of_rows_as_attention_leaves_them() -> None:
    """Groups interleaved, the buffer wider than they are."""
    groups, k, features = 3, 128, 72
    rows = RandomRows.make(9, k, ops.token_tile_for(9), groups)
    buffer = torch.zeros(9, groups + 1, k // 2 + 16, dtype=torch.uint8)
    codes = buffer[:, :groups, : k // 2]
    codes.copy_(rows.rows.codes)
    weight_codes, block_scales, values = random_weights(groups, features, k)
    weights = Weights.grouped(weight_codes, block_scales, scales(groups))
    with emulated_operations():
        out = ops.grouped_product(replace(rows.rows, codes=codes), weights)
    assert out.shape == (9, groups, features)
    for group in range(groups):
        expected = expected_product(
            rows.values(group), values.values(group), rows.rows.scale[:, group], weights.scale[group]
        )
        assert_allowed(out[:, group], expected)


COUNTS = (3, 0, 9)
TILE = 8
STARTS = (0, 8, 8)


def test_expert_gate_up_in_fp32_and_requantised() -> None:
    """The NVFP4 result is the reference recipe applied to the fp32 one; an expert has no tokens."""
    k, hidden = 128, 96
    source = RandomRows.make(24, k, TILE)
    rows = source.for_experts(COUNTS)
    codes, block_scales, values = random_weights(3, 2, hidden, k)
    gate_up = Weights.gated_experts(codes, block_scales, scales(3, 2, seed=3))
    with emulated_operations():
        plain = ops.expert_gate_up(rows, gate_up, LIMIT, dtype=torch.float32)
        quantised = ops.expert_gate_up_quantized(rows, gate_up, LIMIT)
    for expert, (start, count) in enumerate(zip(STARTS, COUNTS, strict=True)):
        tokens, row_scale = source.values()[start : start + count], rows.scale[start : start + count]
        gate, up = (
            expected_product(tokens, values.values(2 * expert + half), row_scale, float(gate_up.scale[expert, half]))
            for half in (0, 1)
        )
        assert_allowed(plain[start : start + count], swiglu(gate, up, LIMIT))
    used = torch.cat([torch.arange(start, start + count) for start, count in zip(STARTS, COUNTS, strict=True)])
    reference = quantize_rows(plain[used], swiglu_row_scale(LIMIT))
    assert torch.equal(quantised.codes[used], reference.packed)
    found = unswizzle_rows(quantised.block_scales.view(torch.uint8), 24, hidden // 16, TILE)
    assert torch.equal(found[used], reference.block_scale.view(torch.uint8))
    assert quantised.scale.item() == swiglu_row_scale(LIMIT)


def test_expert_down_weighs_rows() -> None:
    k, features = 64, 72
    source = RandomRows.make(24, k, TILE)
    rows = replace(source.for_experts(COUNTS), scale=torch.tensor([2.0**-9]))
    codes, block_scales, values = random_weights(3, features, k)
    weights = Weights.experts(codes, block_scales, scales(3))
    row_weight = torch.rand(24, generator=torch.Generator().manual_seed(0))
    with emulated_operations():
        out = ops.expert_down(rows, weights, row_weight)
    for expert, (start, count) in enumerate(zip(STARTS, COUNTS, strict=True)):
        part = slice(start, start + count)
        tokens = source.values()[part]
        expected = expected_product(
            tokens, values.values(expert), torch.full((count,), 2.0**-9), float(weights.scale[expert])
        ).scaled(fp64(row_weight[part])[:, None])
        assert_allowed(out[part], expected)


def test_a_shared_expert_is_one_expert_without_offsets() -> None:
    """Equal, bit for bit, to the same expert with an offset and a count."""
    k, hidden = 128, 64
    rows = RandomRows.make(8, k, TILE)
    codes, block_scales, _ = random_weights(1, 2, hidden, k)
    gate_up = Weights.gated_experts(codes, block_scales, scales(1, 2))
    down = Weights.experts(*random_weights(1, 64, hidden)[:2], scales(1))
    results = []
    with emulated_operations() as runner:
        for source in (rows.rows, rows.for_experts((8,))):
            results.append(ops.expert_down(ops.expert_gate_up_quantized(source, gate_up, LIMIT), down))
    assert [key.shape.grouped for key in runner.keys] == [False, False, True, True]
    assert torch.equal(*results) and results[0].isfinite().all() and results[0].count_nonzero() > 0


def test_no_rows_launch_nothing() -> None:
    codes, block_scales, _ = random_weights(64, 64)
    empty = Rows(
        torch.empty(0, 32, dtype=torch.uint8),
        torch.empty(0, dtype=torch.float8_e4m3fn),
        torch.empty(0),
        ops.token_tile_for(0),
    )
    with emulated_operations() as runner:
        assert ops.product(empty, Weights.dense(codes, block_scales, torch.tensor(1.0))).shape == (0, 64)
    assert not runner.keys


@pytest.mark.parametrize("token_tile", [8, 64, 128, 256])
def test_hidden_buffers_have_the_size_of_their_layout(token_tile: int) -> None:
    rows = RandomRows.make(70, 64, token_tile).rows
    hidden = ops.hidden_rows(rows, 192, LIMIT)
    assert hidden.codes.shape == (70, 96)
    assert hidden.block_scales.numel() == scale_bytes(70, 192, token_tile)
