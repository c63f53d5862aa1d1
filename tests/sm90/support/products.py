"""Random w4a16 products for the Hopper kernels, run in the emulator, and their fp64 references."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.sm90.call import Call
from nvfp4_sgl.cutedsl_kernels.sm90.layout import pack_tiles
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.sm100.support.mutants import NativeFunction
from tests.sm100.support.products import UNIT, Bounded, RandomOperand, poisoned
from tests.support.numpy_nvfp4 import dequantize


@functools.cache
def compile_shape(shape: KernelShape) -> Compiled:
    """A kernel, compiled once a process; it takes a call's arguments and a stream."""
    from nvfp4_sgl.cutedsl_kernels.common.entry import Entry
    from nvfp4_sgl.cutedsl_kernels.sm90.epilogue import Epilogue
    from nvfp4_sgl.cutedsl_kernels.sm90.gemm import W4A16Gemm

    entry = Entry(W4A16Gemm(shape, Epilogue()))
    compiled = compile_for("sm_90a", entry, *entry.example())
    return Compiled(NativeFunction(compiled.function), compiled.ptx)


def span(tensor: Tensor) -> Tensor:
    """All memory from the first to the last element, as a flat tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))


def run(call: Call, options: Options | None = None, clusters: int = 1, compiled: Compiled | None = None) -> Statistics:
    """Execute a call in the emulator on ``clusters`` persistent clusters."""
    read, written = ([span(tensor) for tensor in tensors] for tensors in call.tensors())
    with emulated(options, reads=read, writes=written) as emulator:
        emulator(compiled or compile_shape(call.shape), call.arguments(clusters), 0)
    return emulator.statistics[0]


def random_tokens(*shape: int, seed: int) -> Tensor:
    """bf16 over many magnitudes, with outliers and zeros."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * np.exp2(random.integers(-6, 3, shape))
    values[random.random(shape) < 0.02] *= 300
    values[random.random(shape) < 0.02] = 0
    return torch.from_numpy(values).to(torch.bfloat16)


@dataclass(frozen=True)
class ProductCase:
    """A batch of plain products: ``groups`` times [tokens, k] by [features, k].

    Attributes:
        wider: features, and elements of K, that rows of outputs and tokens are longer by than the product needs.
    """

    shape: KernelShape
    tokens: int
    features: int
    k: int
    groups: int = 1
    wider: int = 0
    seed: int = 1

    def build(self) -> tuple[Call, RandomOperand]:
        """Tokens and outputs of the groups are interleaved, as attention has them."""
        weights = RandomOperand.make(self.groups, self.features, self.k, self.seed)
        wide = random_tokens(self.tokens, self.groups, self.k + self.wider, seed=self.seed + 1)
        wide[..., self.k :] = float("nan")
        out = poisoned(self.tokens, self.groups, self.features + self.wider, output=self.shape.output)
        random = torch.Generator().manual_seed(self.seed)
        call = Call(
            shape=self.shape,
            weights=pack_tiles(weights.packed, weights.scales.view(torch.float8_e4m3fn)),
            tokens=wide[..., : self.k],
            out=out[..., : self.features],
            alpha=torch.exp2(torch.rand(self.groups, self.features, generator=random) * 12 - 20),
        )
        return call, weights

    def check(self, options: Options | None = None, clusters: int = 1, compiled: Compiled | None = None) -> Statistics:
        """Run it and compare every element, and what lies between the rows.

        Raises:
            AssertionError: an element is wrong.
        """
        call, weights = self.build()
        statistics = run(call, options, clusters, compiled)
        for group in range(self.groups):
            tokens = call.tokens[:, group].double().numpy()
            matrix = dequantize(weights.packed[group].numpy(), weights.scales[group].numpy())
            # fp32 sums of K products in any order; the slices of K are added up in between.
            magnitude = np.abs(tokens) @ np.abs(matrix).T
            expected = Bounded(tokens @ matrix.T, (self.k / 8 + 8) * UNIT * magnitude)
            expected = expected.scaled(call.alpha[group].double().numpy())
            wrong = ~expected.allows(call.out[:, group])
            assert not wrong.any(), f"group {group}: {wrong.sum()} of {wrong.size} wrong, first {np.argwhere(wrong)[0]}"
            if self.shape.output == "bf16":
                assert expected.decided(torch.bfloat16) > 0.9, "operands leave too many outputs undecided"
        if self.wider:
            whole = call.out.as_strided((self.tokens, self.groups, self.features + self.wider), call.out.stride())
            assert whole[..., self.features :].isnan().all(), "written beyond a row's end"
        return statistics
