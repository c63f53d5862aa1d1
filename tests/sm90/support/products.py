"""Random products and experts for the Hopper kernels, run in the emulator, and their fp64 references."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.sm90.call import Call
from nvfp4_sgl.cutedsl_kernels.sm90.fp8_layout import pack_fp8_tiles
from nvfp4_sgl.cutedsl_kernels.sm90.layout import pack_tiles
from nvfp4_sgl.cutedsl_kernels.sm90.shape import GATE_ROWS, KernelShape, WeightKind
from nvfp4_sgl.limits import TILED_K_MULTIPLE
from tests.sm100.emulator import Compiled, Options, Statistics, compile_for, emulated
from tests.sm100.support.mutants import NativeFunction
from tests.sm100.support.products import LIMIT, UNIT, Bounded, RandomOperand, poisoned

if TYPE_CHECKING:
    from nvfp4_sgl.cutedsl_kernels.common.entry import Entry


@functools.cache
def compile_shape(shape: KernelShape) -> Compiled:
    """A kernel, compiled once a process; it takes a call's arguments and a stream."""
    return compile_anew(shape)


def compile_anew(shape: KernelShape) -> Compiled:
    """The kernel of whatever the sources' modules hold now."""
    entry = entry_of(shape)
    compiled = compile_for("sm_90a", entry, *entry.example())
    return Compiled(NativeFunction(compiled.function), compiled.ptx)


def entry_of(shape: KernelShape) -> Entry:
    """What ``cute.compile`` compiles."""
    from nvfp4_sgl.cutedsl_kernels.common.entry import Entry
    from nvfp4_sgl.cutedsl_kernels.sm90.epilogue import Epilogue
    from nvfp4_sgl.cutedsl_kernels.sm90.gemm import W4A16Gemm

    return Entry(W4A16Gemm(shape, Epilogue(LIMIT if shape.gated else None)))


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


def random_weights(weights: WeightKind, groups: int, rows: int, k: int, seed: int) -> RandomOperand:
    """Weights as a kernel's shape names them. Of FP8 those of 64 of a row share a scale, and some rows are louder."""
    if weights == "nvfp4":
        return RandomOperand.make(groups, rows, k, seed)
    made = RandomOperand.make(groups, rows, k, seed, "mxfp8")
    random = np.random.default_rng(seed)
    scales = random.integers(118, 131, (groups, rows, k // TILED_K_MULTIPLE), dtype=np.uint8)
    codes = made.packed.clone()
    empty = torch.from_numpy(random.random(scales.shape) < 0.05)
    codes[empty.repeat_interleave(TILED_K_MULTIPLE, dim=-1)] &= 0x80
    blocks = torch.from_numpy(scales).masked_fill(empty, 0).repeat_interleave(2, dim=-1)
    return replace(made, packed=codes, scales=blocks)


def pack(weights: RandomOperand) -> Tensor:
    """As kernels read them."""
    if weights.kind == "mxfp8":
        return pack_fp8_tiles(weights.packed.view(torch.float8_e4m3fn), weights.scales)
    return pack_tiles(weights.packed, weights.scales.view(torch.float8_e4m3fn))


def product(tokens: Tensor, weights: np.ndarray) -> Bounded:
    """``tokens @ weights.T``, known up to fp32 sums in any order; slices of K are added up in between."""
    values = tokens.double().numpy()
    magnitude = np.abs(values) @ np.abs(weights).T
    return Bounded(values @ weights.T, (weights.shape[1] / 8 + 8) * UNIT * magnitude)


def swiglu(gate: Bounded, up: Bounded) -> Bounded:
    """Clamped SwiGLU, between what the bounds of the gate give; besides 2^-20 for the approximate exponential and
    reciprocal, and the rounding of the exponent."""

    def silu(values: np.ndarray) -> np.ndarray:
        clamped = np.minimum(values, LIMIT)
        with np.errstate(over="ignore"):
            return clamped / (1 + np.exp(-clamped))

    found, multiplier = silu(gate.values), np.clip(up.values, -LIMIT, LIMIT)
    # Its minimum may lie between the bounds; the second derivative is at most a half.
    ends = [np.abs(silu(gate.values + sign * gate.slack) - found) for sign in (-1, 1)]
    slack = np.maximum(*ends) + gate.slack**2 * (np.abs(gate.values) < 2)
    values = found * multiplier
    relative = 2.0**-20 + 2 * UNIT * np.abs(gate.values)
    return Bounded(values, slack * np.abs(multiplier) + np.abs(found) * up.slack + relative * np.abs(values) + 1e-30)


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
        weights = random_weights(self.shape.weights, self.groups, self.features, self.k, self.seed)
        wide = random_tokens(self.tokens, self.groups, self.k + self.wider, seed=self.seed + 1)
        wide[..., self.k :] = float("nan")
        out = poisoned(self.tokens, self.groups, self.features + self.wider, output=self.shape.output)
        call = Call(
            shape=self.shape,
            weights=pack(weights),
            tokens=wide[..., : self.k],
            out=out[..., : self.features],
            alpha=self._alphas(),
        )
        return call, weights

    def _alphas(self) -> Tensor:
        """A global scale for each feature; of FP8 weights a one that is there once, as the operator passes it."""
        if self.shape.weights == "fp8":
            return torch.ones(1).expand(self.groups, self.features)
        random = torch.Generator().manual_seed(self.seed)
        return torch.exp2(torch.rand(self.groups, self.features, generator=random) * 12 - 20)

    def check(self, options: Options | None = None, clusters: int = 1, compiled: Compiled | None = None) -> Statistics:
        """Run it and compare every element, and what lies between the rows.

        Raises:
            AssertionError: an element is wrong.
        """
        call, weights = self.build()
        statistics = run(call, options, clusters, compiled)
        for group in range(self.groups):
            expected = product(call.tokens[:, group], weights.values(group))
            expected = expected.scaled(call.alpha[group].double().numpy())
            wrong = ~expected.allows(call.out[:, group])
            assert not wrong.any(), f"group {group}: {wrong.sum()} of {wrong.size} wrong, first {np.argwhere(wrong)[0]}"
            if self.shape.output == "bf16":
                assert expected.decided(torch.bfloat16) > 0.9, "operands leave too many outputs undecided"
        if self.wider:
            whole = call.out.as_strided((self.tokens, self.groups, self.features + self.wider), call.out.stride())
            assert whole[..., self.features :].isnan().all(), "written beyond a row's end"
        return statistics


@dataclass(frozen=True)
class ExpertCase:
    """Experts with given token counts, of ``features`` outputs; a kernel that is not grouped has one, of all rows.

    Rows of an expert's last tile that hold no token are NaN. Behind each expert lie ``spare`` tiles that are nobody's:
    no kernel may write them.

    Attributes:
        backwards: the first expert's rows come last.
        loudness: log2 of a factor of all alphas. At 0 about every tenth gate is beyond the limit.
    """

    shape: KernelShape
    counts: tuple[int, ...]
    features: int
    k: int
    spare: int = 1
    backwards: bool = False
    loudness: float = 0.0
    seed: int = 1

    def padded(self, count: int) -> int:
        """Rows of whole tiles."""
        return -(-count // self.shape.token_tile) * self.shape.token_tile

    def offsets(self) -> Tensor:
        """int32 [experts]: first rows; and, as another element, the rows of all."""
        sizes = [self.padded(count) + self.spare * self.shape.token_tile for count in self.counts]
        ends = np.cumsum(sizes[::-1] if self.backwards else sizes)
        starts = np.concatenate(([0], ends[:-1]))
        return torch.tensor([*(starts[::-1] if self.backwards else starts), ends[-1]], dtype=torch.int32)

    def rows(self) -> list[slice]:
        """Each expert's rows that hold a token."""
        starts = self.offsets().tolist()
        return [slice(start, start + count) for start, count in zip(starts, self.counts, strict=False)]

    def build(self) -> tuple[Call, RandomOperand]:
        """The call, and weights [experts * 2 if gated, features, k]: an expert's gates, then its ups."""
        shape, parts, experts = self.shape, self.shape.rows_per_feature, len(self.counts)
        *starts, rows = self.offsets().tolist() if shape.grouped else (0, self.counts[0])
        weights = RandomOperand.make(experts * parts, self.features, self.k, self.seed)
        laid_out = weights
        if shape.gated:
            pairs = (plain.unflatten(0, (-1, 2)) for plain in (weights.packed, weights.scales))
            laid_out = RandomOperand(*(t.unflatten(2, (-1, GATE_ROWS)).transpose(1, 2).flatten(1, 3) for t in pairs))
        tokens = random_tokens(rows, self.k, seed=self.seed + 1)
        for start, count in zip(starts, self.counts, strict=True):
            tokens[start + count : start + self.padded(count)] = float("nan")
        random = torch.Generator().manual_seed(self.seed)
        alpha = torch.exp2(torch.rand(experts, parts, generator=random) * 2 - 5.5 + self.loudness) / self.k
        matrix, sources = self._unsorted(tokens) if shape.gathers else (tokens, None)
        call = Call(
            shape=shape,
            weights=pack(laid_out),
            tokens=matrix,
            sources=sources,
            out=poisoned(rows, self.features, output=shape.output),
            alpha=alpha if shape.gated else alpha[:, 0],
            offsets=self.offsets()[:-1].clone() if shape.grouped else None,
            counts=torch.tensor(self.counts, dtype=torch.int32) if shape.grouped else None,
        )
        return call, weights

    def _unsorted(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that hold a token in another order, every third of them shared with its neighbour; their places."""
        used = torch.cat([torch.arange(rows.start, rows.stop) for rows in self.rows()])
        order = torch.randperm(len(used), generator=torch.Generator().manual_seed(self.seed))
        sources = torch.full((len(tokens),), -1, dtype=torch.int32)
        matrix = tokens.new_full((max(len(used), 1), self.k), float("nan"))
        for place, row in zip(order.tolist(), used.tolist(), strict=True):
            sources[row], matrix[place] = place, tokens[row]
        for row, other in zip(used[1::3].tolist(), used[::3].tolist(), strict=False):
            matrix[sources[row]] = float("nan")  # nobody's any more
            sources[row] = sources[other]
        return matrix, sources

    def tokens(self, call: Call) -> Tensor:
        """Sorted by expert; NaN where there is none."""
        if call.sources is None:
            return call.tokens
        rows = call.tokens[call.sources.clamp(min=0).long()]
        return rows.masked_fill((call.sources < 0)[:, None], float("nan"))

    def factored(self, call: Call, weights: RandomOperand) -> list[list[Bounded]]:
        """For each expert gates and ups, or results, before the SwiGLU."""
        parts = self.shape.rows_per_feature
        alphas, tokens = call.alpha.view(-1, parts).double().numpy(), self.tokens(call)

        def part(expert: int, rows: slice, which: int) -> Bounded:
            return product(tokens[rows], weights.values(expert * parts + which)).scaled(alphas[expert, which])

        return [[part(expert, rows, i) for i in range(parts)] for expert, rows in enumerate(self.rows())]

    def compare(self, call: Call, weights: RandomOperand) -> None:
        """Compare every row that holds a token, and look at those that no kernel may write.

        Raises:
            AssertionError: an element is wrong.
        """
        free = torch.ones(call.rows, dtype=torch.bool)
        for expert, (rows, parts) in enumerate(zip(self.rows(), self.factored(call, weights), strict=True)):
            expected = swiglu(*parts) if self.shape.gated else parts[0]
            wrong = ~expected.allows(call.out[rows])
            place = f"expert {expert}: {wrong.sum()} of {wrong.size} wrong"
            assert not wrong.any(), f"{place}, first {np.argwhere(wrong)[0]}"
            if self.shape.output == "bf16" and wrong.size:
                assert expected.decided(torch.bfloat16) > 0.8, "operands leave too many outputs undecided"
            free[rows.start : rows.start + self.padded(self.counts[expert])] = False
        untouched = poisoned(int(free.sum()), self.features, output=self.shape.output)
        assert torch.equal(call.out[free].view(torch.uint8), untouched.view(torch.uint8)), "nobody's rows were written"

    def check(self, options: Options | None = None, clusters: int = 1, compiled: Compiled | None = None) -> Statistics:
        """Run it and :meth:`compare`."""
        call, weights = self.build()
        statistics = run(call, options, clusters, compiled)
        self.compare(call, weights)
        return statistics
