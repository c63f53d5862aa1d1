"""A product launched as the programmatic dependent of the one whose output it takes waits for it, and not before."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.sm100.arguments import arguments_of
from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import KernelShape
from tests.sm100.emulator import Compiled, HazardError, Options, emulated
from tests.sm100.support.entries import compile_entry
from tests.sm100.support.products import RandomOperand, poisoned, product, swizzle_rows
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
        return Call(shape, weights.packed, weights.swizzled(), tokens, swizzled, out, row_scale, alpha)

    made: list[tuple[RandomOperand, torch.Tensor]] = []
    codes = RandomOperand.make(1, TOKENS, K, 5).packed.transpose(0, 1).contiguous()
    first = call(FIRST, K, WIDTH, codes, torch.ones(TOKENS, 1))
    taken = first.out.view(torch.uint8).view(TOKENS, 1, 4 * WIDTH)
    second = call(SECOND, 8 * WIDTH, FEATURES, taken, first.out[:, :, 0])
    compiled = [compile_entry(one.shape, Epilogue(), programmatic_launch=True) for one in (first, second)]
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
            emulator(compiled, arguments_of(call, 1), 0)


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
