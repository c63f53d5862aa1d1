"""Random NVFP4 and MXFP8 products as the SM100 kernels take them, run in the emulator, and their fp64 references."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.epilogue import Epilogue
from nvfp4_sgl.cutedsl_kernels.sm100.shape import COUNTER_WORDS, BlockScaledKind, KernelShape
from nvfp4_sgl.formats.nvfp4 import quantize_rows, swiglu_row_scale
from nvfp4_sgl.formats.scale_layout import scale_rows, swizzle_128x4, unswizzle_128x4
from tests.sm100.emulator import Compiled, Options, Statistics, emulated
from tests.sm100.support.entries import compile_entry
from tests.sm100.support.narrow_operands import NarrowOperand
from tests.support.numpy_nvfp4 import dequantize

LIMIT = 10.0
"""The SwiGLU clamp."""
NAN_SCALES = {"nvfp4": 0x7F, "mxfp8": 0xFF}
"""NaN of E4M3 and of UE8M0: what block scales that no result may depend on are filled with."""
NAN_SCALE = NAN_SCALES["nvfp4"]
WORKSPACE_CLUSTERS = 8
"""The most clusters that may use the workspace of a :class:`ProductCase`."""
UNIT = 2.0**-24
"""Half an ulp of fp32, relative."""


def compile_call(call: Call, epilogue: Epilogue, architecture: str = "sm_100a") -> Compiled:
    """The kernel that a call needs, compiled once a process."""
    return compile_entry(call.shape, epilogue, architecture)


def run(
    call: Call, epilogue: Epilogue, options: Options | None = None, clusters: int = 1, compiled: Compiled | None = None
) -> Statistics:
    """Execute a call in the emulator on ``clusters`` persistent clusters."""
    read, written = call.tensors()
    with emulated(options, reads=read, writes=written) as emulator:
        emulator(compiled or compile_call(call, epilogue), call.arguments(clusters), 0)
    return emulator.statistics[0]


@dataclass(frozen=True)
class RandomOperand:
    """Random codes and block scales of ``groups`` matrices [rows, k]: packed [groups, rows, k/2] and plain scales.

    Codes of MXFP8 take a byte each.
    """

    packed: Tensor
    scales: Tensor
    kind: BlockScaledKind = "nvfp4"

    @classmethod
    def make(cls, groups: int, rows: int, k: int, seed: int, kind: BlockScaledKind = "nvfp4") -> RandomOperand:
        """All codes, and scales over E4M3's whole finite range; a twentieth of the blocks have the scale 0."""
        random = np.random.default_rng(seed)
        if kind == "mxfp8":
            return cls._mxfp8(random, groups, rows, k)
        packed = random.integers(0, 256, (groups, rows, k // 2), dtype=np.uint8)
        scales = random.integers(0, 127, (groups, rows, k // 16), dtype=np.uint8)
        scales[random.random(scales.shape) < 0.05] = 0
        return cls(torch.from_numpy(packed), torch.from_numpy(scales))

    @classmethod
    def _mxfp8(cls, random: np.random.Generator, groups: int, rows: int, k: int) -> RandomOperand:
        """All finite codes, scales from 2^-9 to 2^3; a twentieth of the blocks have the least scale and codes 0."""
        codes = random.integers(0, 127, (groups, rows, k), dtype=np.uint8)
        codes |= random.integers(0, 2, codes.shape, dtype=np.uint8) << 7
        scales = random.integers(118, 131, (groups, rows, -(-k // 32)), dtype=np.uint8)
        empty = random.random(scales.shape) < 0.05
        scales[empty] = 0
        codes[np.repeat(empty, 32, axis=2)[..., :k]] = 0
        return cls(torch.from_numpy(codes), torch.from_numpy(scales), "mxfp8")

    def values(self, group: int) -> np.ndarray:
        """fp64 [rows, k]."""
        codes, scales = self.packed[group].numpy(), self.scales[group].numpy()
        if self.kind == "mxfp8":
            return NarrowOperand("e4m3", codes).values() * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, 1)
        return dequantize(codes, scales)

    def swizzled(self) -> Tensor:
        """Block scales of each matrix swizzled, one matrix after the other; NaN in the padding."""
        return torch.stack([swizzle_rows(scales, 128, self.kind) for scales in self.scales])


def whole_atoms(scales: Tensor) -> Tensor:
    """Block scales [rows, kb] with kb padded to a multiple of 4, by zeros."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4))


def swizzle_rows(scales: Tensor, token_tile: int, kind: BlockScaledKind = "nvfp4") -> Tensor:
    """Block scales [rows, kb] as a kernel of that token tile takes them; NaN in the padding rows."""
    rows, kb = scales.shape
    tile = min(token_tile, 128)
    tiles = -(-rows // tile)
    padded = torch.full((tiles * tile, kb), NAN_SCALES[kind], dtype=torch.uint8)
    padded[:rows] = scales.view(torch.uint8)
    spread = torch.full((tiles, 128, kb), NAN_SCALES[kind], dtype=torch.uint8)
    spread[:, :tile] = padded.view(tiles, tile, kb)
    return swizzle_128x4(spread.view(-1, kb))


def interleave_gates(plain: Tensor) -> Tensor:
    """Rows [E, 2, I, ...] of gates and ups as a gated kernel takes them: [E, 2 I, ...], 16 gates, 16 ups, and so on."""
    experts, _, features, *rest = plain.shape
    order = [half * features + first + i for first in range(0, features, 16) for half in (0, 1) for i in range(16)]
    return plain.reshape(experts, 2 * features, *rest)[:, order]


def unswizzle_rows(scales: Tensor, rows: int, kb: int, token_tile: int) -> Tensor:
    """Inverse of :func:`swizzle_rows`."""
    tile = min(token_tile, 128)
    spread = unswizzle_128x4(scales, scale_rows(rows, token_tile), kb)
    return spread.view(-1, 128, kb)[:, :tile].reshape(-1, kb)[:rows]


@dataclass(frozen=True)
class Bounded:
    """fp64 values and a bound on how far fp32 sums in any order may be from them."""

    values: np.ndarray
    slack: np.ndarray

    def scaled(self, factors: np.ndarray) -> Bounded:
        """Multiplied in fp32: one rounding."""
        values = self.values * factors
        return Bounded(values, self.slack * np.abs(factors) + UNIT * np.abs(values))

    def allows(self, found: Tensor) -> np.ndarray:
        """Which elements of a bf16 or fp32 result equal the rounding of a value within the slack."""
        low = torch.from_numpy(self.values - self.slack).to(found.dtype)
        high = torch.from_numpy(self.values + self.slack).to(found.dtype)
        return ((low <= found) & (found <= high)).numpy()

    def decided(self, dtype: torch.dtype) -> float:
        """Share of the elements that have a single right answer in ``dtype``."""
        low, high = (torch.from_numpy(self.values + sign * self.slack).to(dtype) for sign in (-1, 1))
        return float((low == high).double().mean())


def product(tokens: np.ndarray, weights: np.ndarray, mma_k: int = 64) -> Bounded:
    """``tokens @ weights.T`` where every instruction, of 64 or 32 of K, may round once."""
    magnitude = np.abs(tokens) @ np.abs(weights).T
    return Bounded(tokens @ weights.T, (tokens.shape[1] / mma_k + 1) * UNIT * magnitude)


def swiglu(gate: Bounded, up: Bounded, limit: float = LIMIT) -> Bounded:
    """Clamped SwiGLU of values known up to a slack; 2^-20 relative for the approximate exponential and reciprocal."""
    g = np.minimum(gate.values, limit)
    u = np.clip(up.values, -limit, limit)
    with np.errstate(over="ignore"):
        silu = g / (1 + np.exp(-g))
    values = silu * u
    slope = 1.1  # |d silu / d g| stays below it
    return Bounded(values, slope * gate.slack * np.abs(u) + np.abs(silu) * up.slack + 2.0**-20 * np.abs(values) + 1e-30)


def poisoned(*shape: int, output: str) -> Tensor:
    """An output that no kernel has written."""
    if output == "nvfp4":
        return torch.full(shape, 0xCC, dtype=torch.uint8)
    return torch.full(shape, float("nan"), dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[output])


def poisoned_workspace(shape: KernelShape) -> Tensor | None:
    """Counters that are zero, and sums that are not numbers; None for a kernel that has none."""
    if not shape.stream_k:
        return None
    words = torch.full((shape.workspace_bytes(WORKSPACE_CLUSTERS) // 4,), float("nan"))
    words[:COUNTER_WORDS] = 0.0
    return words.view(torch.uint8)


@dataclass(frozen=True)
class ProductCase:
    """A batch of plain products: ``groups`` times [tokens, k] by [features, k]."""

    shape: KernelShape
    tokens: int
    features: int
    k: int
    groups: int = 1
    seed: int = 1

    def operands(self) -> tuple[RandomOperand, RandomOperand]:
        """(weights, tokens)"""
        kind = self.shape.operands
        weights = RandomOperand.make(self.groups, self.features, self.k, self.seed, kind)
        return weights, RandomOperand.make(self.groups, self.tokens, self.k, self.seed + 1, kind)

    def build(self) -> tuple[Call, Epilogue]:
        """Tokens and outputs of the groups are interleaved, as attention has them."""
        weights, tokens = self.operands()
        random = torch.Generator().manual_seed(self.seed)
        row_scale = torch.exp2(torch.rand(self.tokens, self.groups, generator=random) * 12 - 20)
        alpha = torch.exp2(torch.randint(-12, 0, (self.groups, self.features), generator=random).float())
        call = Call(
            shape=self.shape,
            weights=weights.packed,
            weight_scales=weights.swizzled(),
            tokens=tokens.packed.transpose(0, 1).contiguous(),
            token_scales=swizzle_rows(
                torch.cat([whole_atoms(scales) for scales in tokens.scales], dim=1),
                self.shape.token_tile,
                self.shape.operands,
            ),
            out=poisoned(self.tokens, self.groups, self.features, output=self.shape.output),
            row_scale=row_scale,
            alpha=alpha,
            workspace=poisoned_workspace(self.shape),
        )
        return call, Epilogue()

    def check(self, options: Options | None = None, clusters: int = 1, compiled: Compiled | None = None) -> Statistics:
        """Run it and compare every element.

        Raises:
            AssertionError: an element is wrong.
        """
        call, epilogue = self.build()
        weights, tokens = self.operands()
        row_scale, alpha = call.row_scale, call.alpha
        statistics = run(call, epilogue, options, clusters, compiled)
        for group in range(self.groups):
            expected = product(tokens.values(group), weights.values(group), 32 * self.shape.byte_elements)
            expected = expected.scaled(row_scale[:, group, None].double().numpy()).scaled(alpha[group].double().numpy())
            wrong = ~expected.allows(call.out[:, group])
            assert not wrong.any(), f"group {group}: {wrong.sum()} of {wrong.size} wrong, first {np.argwhere(wrong)[0]}"
            if self.shape.output == "bf16":
                assert expected.decided(torch.bfloat16) > 0.95, "operands leave too many outputs undecided"
        return statistics


@dataclass(frozen=True)
class ExpertCase:
    """Experts with given token counts, of ``features`` outputs; gated or with a weight for each row, as ``shape.gated``
    says.

    A kernel that is not grouped has one expert whose tokens are all rows. ``spare`` token tiles behind each expert's
    are nobody's: no kernel may write them.
    """

    shape: KernelShape
    counts: tuple[int, ...]
    features: int
    k: int
    seed: int = 1
    spare: int = 0

    @property
    def limit(self) -> float | None:
        return LIMIT if self.shape.gated else None

    def epilogue(self, output: str) -> Epilogue:
        constant = swiglu_row_scale(LIMIT) if output == "nvfp4" else None
        return Epilogue(self.limit, weighted=not self.shape.gated, row_scale_constant=constant)

    def build(self) -> tuple[Call, RandomOperand, RandomOperand, np.ndarray]:
        """(call, weights, tokens, rows that hold a token)."""
        shape, tile = self.shape, self.shape.token_tile
        counts = torch.tensor(self.counts, dtype=torch.int32)
        padded = ((counts + tile - 1) // tile + self.spare) * tile
        offsets = (padded.cumsum(0) - padded).to(torch.int32)
        rows = max(int(padded.sum()), tile) if shape.grouped else self.counts[0]
        parts = shape.rows_per_feature
        weights = RandomOperand.make(len(counts) * parts, self.features, self.k, self.seed, shape.operands)
        laid_out = weights
        if shape.gated:
            packed, plain = (t.unflatten(0, (-1, 2)) for t in (weights.packed, weights.scales))
            laid_out = RandomOperand(interleave_gates(packed), interleave_gates(plain), shape.operands)
        tokens = RandomOperand.make(1, rows, self.k, self.seed + 1, shape.operands)
        used = np.concatenate([np.arange(o, o + n) for o, n in zip(offsets, counts, strict=True)]).astype(int)
        scales = torch.full_like(tokens.scales[0], NAN_SCALES[shape.operands])
        scales[used] = tokens.scales[0][used]
        random = torch.Generator().manual_seed(self.seed)
        # Products of full-range scales are near 2^16 * sqrt(k): factors that put SwiGLU's inputs around its limit.
        row_scale = torch.full((rows,), float("nan"))
        row_scale[used] = torch.exp2(torch.rand(len(used), generator=random) * 4 - 11)
        # Tokens so small that their blocks re-quantise to the scale 0.
        row_scale[used[3::8]] *= 2.0**-24
        alpha = torch.exp2(torch.rand(len(counts), parts, generator=random) * 2 - 9)
        codes = self.features // 2 if shape.output == "nvfp4" else self.features
        out_scales = None
        if shape.output == "nvfp4":
            out_scales = poisoned(scale_rows(rows, tile) * (-(-self.features // 64) * 4), output="nvfp4")
        call = Call(
            shape=shape,
            weights=laid_out.packed,
            weight_scales=laid_out.swizzled(),
            tokens=tokens.packed[0],
            token_scales=swizzle_rows(scales, tile, shape.operands),
            out=poisoned(rows, codes, output=shape.output),
            row_scale=row_scale,
            alpha=alpha,
            out_scales=out_scales,
            row_weight=None if shape.gated else torch.rand(rows, generator=random),
            offsets=offsets if shape.grouped else None,
            counts=counts if shape.grouped else None,
        )
        return call, weights, tokens, used

    def expected(self, call: Call, weights: RandomOperand, tokens: RandomOperand) -> list[tuple[slice, Bounded]]:
        """For each expert with tokens: its rows and what they should be."""
        found = []
        values = tokens.values(0)
        for expert, count in enumerate(self.counts):
            first = 0 if call.offsets is None else int(call.offsets[expert])
            rows = slice(first, first + count)
            if not count:
                continue
            factors = call.row_scale[rows, None].double().numpy()
            parts = [
                product(
                    values[rows],
                    weights.values(expert * len(call.alpha[expert]) + half),
                    32 * self.shape.byte_elements,
                )
                .scaled(factors)
                .scaled(np.array(float(call.alpha[expert, half])))
                for half in range(len(call.alpha[expert]))
            ]
            if self.shape.gated:
                found.append((rows, swiglu(parts[0], parts[1])))
            else:
                assert call.row_weight is not None
                found.append((rows, parts[0].scaled(call.row_weight[rows, None].double().numpy())))
        return found

    def check(self, options: Options | None = None, clusters: int = 1, compiled: Compiled | None = None) -> Statistics:
        """Run it and compare every row that holds a token.

        NVFP4 output must equal the reference recipe applied to the fp32 output of the same kernel, bit for bit.

        Raises:
            AssertionError: an element is wrong.
        """
        call, weights, tokens, used = self.build()
        statistics = run(call, self.epilogue(self.shape.output), options, clusters, compiled)
        self.check_spare(call)
        if self.shape.output == "nvfp4":
            assert call.out_scales is not None
            plain = replace(self, shape=replace(self.shape, output="fp32"))
            hidden, *_ = plain.build()
            run(hidden, plain.epilogue("fp32"))
            plain.compare(hidden, weights, tokens)
            quantised = quantize_rows(hidden.out[used], swiglu_row_scale(LIMIT))
            assert torch.equal(call.out[used], quantised.packed)
            scales = unswizzle_rows(call.out_scales, call.rows, self.features // 16, self.shape.token_tile)
            assert torch.equal(scales[used], quantised.block_scale.view(torch.uint8))
        else:
            self.compare(call, weights, tokens)
        return statistics

    def check_spare(self, call: Call) -> None:
        """Raise ``AssertionError`` where a row of a spare tile was written."""
        tile = self.shape.token_tile
        ends = [] if call.offsets is None or not self.spare else [*call.offsets[1:].tolist(), call.rows]
        for end in ends:
            rows = slice(end - self.spare * tile, end)
            untouched = poisoned(self.spare * tile, call.out.shape[1], output=self.shape.output)
            assert torch.equal(call.out[rows].view(torch.uint8), untouched.view(torch.uint8)), f"{rows} were written"
            if call.out_scales is not None:
                scales = unswizzle_rows(call.out_scales, call.rows, self.features // 16, tile)[rows]
                assert (scales == poisoned(1, output="nvfp4")).all(), f"scales of {rows} were written"

    def compare(self, call: Call, weights: RandomOperand, tokens: RandomOperand) -> None:
        """Raise ``AssertionError`` where an element of a row that holds a token is wrong."""
        for rows, expected in self.expected(call, weights, tokens):
            wrong = ~expected.allows(call.out[rows])
            assert not wrong.any(), f"{rows}: {wrong.sum()} of {wrong.size} wrong, first {np.argwhere(wrong)[0]}"
