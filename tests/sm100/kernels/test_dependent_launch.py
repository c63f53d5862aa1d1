"""Products launched as programmatic dependents of those whose outputs they take wait for them, and not before."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale
from tests.sm100.emulator import Compiled, HazardError, Options, emulated
from tests.sm100.support.entries import compile_entry
from tests.sm100.support.products import (
    LIMIT,
    ExpertCase,
    RandomOperand,
    compile_call,
    poisoned,
    product,
    swizzle_rows,
    unswizzle_rows,
)
from tests.support.numpy_nvfp4 import dequantize

TOKENS, WIDTH, FEATURES, K = 8, 128, 256, 320
FIRST, SECOND = KernelShape(8, output="fp32"), KernelShape(8)
WAIT = "griddepcontrol.wait;"


@functools.cache
def chain() -> tuple[tuple[Call, Compiled], tuple[Call, Compiled], RandomOperand, torch.Tensor]:
    """Two products, the second one's weights and token scales.

    The bytes of the first one's fp32 output are the second one's FP4 codes, and a column of it is its row scale.
    """

    def call(shape: KernelShape, k: int, features: int, tokens: torch.Tensor, row_scale: torch.Tensor) -> Call:
        scales = RandomOperand.make(1, TOKENS, k, 3).scales[0]
        weights = RandomOperand.make(1, features, k, 4)
        out = poisoned(TOKENS, 1, features, output=shape.output)
        alpha = torch.full((1, features), 2.0**-20)
        swizzled = swizzle_rows(scales, shape.token_tile)
        made.append((weights, scales))
        return Call(
            shape=shape,
            weights=weights.packed,
            weight_scales=weights.swizzled(),
            tokens=tokens,
            token_scales=swizzled,
            out=out,
            row_scale=row_scale,
            alpha=alpha,
        )

    made: list[tuple[RandomOperand, torch.Tensor]] = []
    codes = RandomOperand.make(1, TOKENS, K, 5).packed.transpose(0, 1).contiguous()
    first = call(FIRST, K, WIDTH, codes, torch.ones(TOKENS, 1))
    taken = first.out.view(torch.uint8).view(TOKENS, 1, 4 * WIDTH)
    second = call(SECOND, 8 * WIDTH, FEATURES, taken, first.out[:, :, 0])
    compiled = [compile_entry(one.shape, Epilogue()) for one in (first, second)]
    return (first, compiled[0]), (second, compiled[1]), *made[1]


def run(options: Options, second_compiled: Compiled) -> None:
    (first, first_compiled), (second, _), _, _ = chain()
    first.out.fill_(1.0)
    second.out.fill_(float("nan"))
    reads = [
        *first.tensors()[0],
        *(t for t in second.tensors()[0] if t is not second.tokens and t is not second.row_scale),
    ]
    with emulated(options, reads=reads, writes=[first.out, second.out]) as emulator:
        for call, compiled in ((first, first_compiled), (second, second_compiled)):
            emulator(compiled, call.arguments(1), 0)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_second_takes_what_the_first_gives(seed: int | None) -> None:
    options = Options(overlap=True) if seed is None else Options("random", seed, overlap=True)
    (first, _), (second, compiled), weights, scales = chain()
    run(options, compiled)
    codes = first.out.view(torch.uint8).view(TOKENS, -1).numpy()
    factors = first.out[:, 0, :1].double().numpy() * 2.0**-20
    expected = product(dequantize(codes, scales.numpy()), weights.values(0)).scaled(factors)
    assert expected.allows(second.out[:, 0]).all()
    assert np.isfinite(expected.values).all() and expected.values.any()


def test_each_wait_is_needed() -> None:
    """The one for the tokens and the one for what the epilogue reads."""
    _, (_, compiled), _, _ = chain()
    pieces = compiled.ptx.split(WAIT)
    assert len(pieces) == 3
    for left_out in range(1, len(pieces)):
        ptx = WAIT.join(pieces[:left_out]) + WAIT.join(pieces[left_out:])
        with pytest.raises(HazardError, match=r"without griddepcontrol\.wait"):
            run(Options(overlap=True), Compiled(compiled.function, ptx))


COUNTS = (3, 0, 6, 1)
"""Rows of each expert. They, and the number of token tiles before each, are small E2M1 values."""
TILE = 8
ONE, E2M1 = 2, {0: 0, 1: 2, 2: 4, 3: 5, 4: 6, 6: 7}
"""Codes by value."""


def routing() -> Call:
    """A product whose fp32 results are int32 tables as they lie: subnormals. Row 0 is offsets, row 1 counts."""
    tables = torch.tensor([[sum(map(bool, COUNTS[:expert])) for expert in range(len(COUNTS))], COUNTS])
    tokens, weights = torch.zeros(2, 1, 32, dtype=torch.uint8), torch.zeros(1, len(COUNTS), 32, dtype=torch.uint8)
    for row in range(2):
        tokens[row, 0, 8 * row] = ONE
        weights[0, :, 8 * row] = torch.tensor([E2M1[int(value)] for value in tables[row]], dtype=torch.uint8)
    ones = torch.full((len(COUNTS), 4), 0x38, dtype=torch.uint8)
    return Call(
        shape=KernelShape(8, output="fp32"),
        weights=weights,
        weight_scales=swizzle_rows(ones, 128)[None],
        tokens=tokens,
        token_scales=swizzle_rows(ones[:2], 8),
        out=poisoned(2, 1, len(COUNTS), output="fp32"),
        row_scale=torch.tensor([[float(TILE)], [1.0]]),
        alpha=torch.full((1, len(COUNTS)), 2.0**-149),
    )


@functools.cache
def expert_layer(split_k: int) -> tuple[tuple[Call, Compiled], ...]:
    """Routing, gate and up, down: each takes what those before it write."""
    routes = routing()
    offsets, counts = routes.out.view(torch.int32)[:, 0]
    shape = KernelShape(TILE, gated=True, grouped=True, split_k=split_k, output="nvfp4")
    upper = ExpertCase(shape, COUNTS, features=256 * split_k, k=256 * split_k)
    lower = ExpertCase(KernelShape(TILE, grouped=True, split_k=split_k), COUNTS, features=136, k=256 * split_k)
    gate_up = replace(upper.build()[0], offsets=offsets, counts=counts)
    assert gate_up.out_scales is not None
    down = replace(
        lower.build()[0],
        tokens=gate_up.out,
        token_scales=gate_up.out_scales,
        row_scale=torch.tensor([swiglu_row_scale(LIMIT)]),
        offsets=offsets,
        counts=counts,
    )
    epilogues = Epilogue(), upper.epilogue("nvfp4"), lower.epilogue("bf16")
    return tuple((call, compile_call(call, one)) for call, one in zip((routes, gate_up, down), epilogues, strict=True))


def run_layer(
    options: Options, split_k: int, mutants: dict[int, Compiled] | None = None, clusters: int = 2
) -> tuple[torch.Tensor, ...]:
    """Outputs of the rows that hold a token: codes, block scales, results.

    Args:
        mutants: what runs in place of a kernel of the layer.
    """
    layer = expert_layer(split_k)
    written = [tensor for call, _ in layer for tensor in call.tensors()[1]]
    for tensor in written:
        tensor.view(torch.uint8).fill_(0xCC)
    layer[0][0].out.zero_()  # counts that a kernel may read too early and go on
    starts = {tensor.data_ptr() for tensor in written}
    inside = layer[0][0].out.view(torch.int32)[1, 0].data_ptr()
    reads = [t for call, _ in layer for t in call.tensors()[0] if t.data_ptr() not in starts | {inside}]
    with emulated(options, reads=reads, writes=written) as emulator:
        for index, (call, compiled) in enumerate(layer):
            emulator((mutants or {}).get(index, compiled), call.arguments(clusters), 0)
    (routes, _), (gate_up, _), (down, _) = layer
    assert routes.out.view(torch.int32)[1, 0].tolist() == list(COUNTS)
    assert gate_up.out_scales is not None
    offsets = routes.out.view(torch.int32)[0, 0].tolist()
    rows = torch.tensor([start + row for start, count in zip(offsets, COUNTS, strict=True) for row in range(count)])
    scales = unswizzle_rows(gate_up.out_scales, gate_up.rows, gate_up.outputs // 16, TILE)
    return gate_up.out[rows].clone(), scales[rows], down.out[rows].clone()


@functools.cache
def run_alone(split_k: int) -> tuple[torch.Tensor, ...]:
    """What launches give that do not overlap."""
    return run_layer(Options(), split_k)


@pytest.mark.parametrize("split_k", [1, 2])
@pytest.mark.parametrize("seed", [None, 1])
def test_experts_take_counts_and_rows_from_the_launches_before(seed: int | None, split_k: int) -> None:
    alone = run_alone(split_k)
    assert alone[2].isfinite().all() and alone[2].count_nonzero() > 0.7 * alone[2].numel()
    options = Options(overlap=True) if seed is None else Options("random", seed, overlap=True)
    for found, expected in zip(run_layer(options, split_k), alone, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kernel", [1, 2], ids=["gate and up", "down"])
@pytest.mark.parametrize("split_k", [1, 2])
def test_experts_need_their_wait(kernel: int, split_k: int) -> None:
    """There is one, before the counts are read."""
    compiled = expert_layer(split_k)[kernel][1]
    with pytest.raises(HazardError, match=r"without griddepcontrol\.wait"):
        run_layer(Options(overlap=True), split_k, {kernel: compiled.patched(WAIT, "")})
