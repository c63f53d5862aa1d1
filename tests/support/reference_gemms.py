"""The GEMMs of Hopper and SM100 computed in torch: a launcher that executes checked calls from their definition.

For tests of what is composed around the GEMMs; the kernels themselves are executed in the emulator
(``tests.sm100.support.launcher``), which takes minutes where this takes seconds. Sums are fp32, in an order of their
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.common.call import GemmCall
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS, Clusters
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import LibraryError
from nvfp4_sgl.cutedsl_kernels.plan import Pin
from nvfp4_sgl.cutedsl_kernels.sm90.call import Call as HopperCall
from nvfp4_sgl.cutedsl_kernels.sm90.choose import H200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.sm90.fp8_layout import unpack_fp8_tiles
from nvfp4_sgl.cutedsl_kernels.sm90.layout import unpack_tiles
from nvfp4_sgl.cutedsl_kernels.sm90.shape import GATE_ROWS as HOPPER_GATE_ROWS
from nvfp4_sgl.cutedsl_kernels.sm100.call import Call
from nvfp4_sgl.cutedsl_kernels.sm100.shape import GATE_ROWS, BlockScaledKind
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor, quantize_rows
from nvfp4_sgl.formats.scale_layout import swizzle_128x4, unswizzle_128x4
from nvfp4_sgl.ops.swiglu import clamped_swiglu

E4M3 = torch.float8_e4m3fn


def _unscaled(codes: Tensor, scales: Tensor, kind: BlockScaledKind = "nvfp4") -> Tensor:
    if kind == "mxfp8":
        return MxFp8Tensor(codes.contiguous().view(E4M3), scales[:, : codes.shape[-1] // 32].contiguous()).dequantize()
    return NvFp4Tensor(codes, scales.view(E4M3), torch.ones(())).unscaled()


@dataclass
class ReferenceLauncher:
    """Computes each call at once; ``keys`` are the kernels that would have run, in order.

    Once frozen, it refuses a kernel that has not run before, as the launcher on CUDA does.
    """

    name: str = "sm_100a"
    programmatic_launch: bool = True
    pin: Pin | None = None
    keys: list[KernelKey] = field(default_factory=list)
    ready: frozenset[KernelKey] | None = None

    def architecture(self, device: torch.device) -> str:
        return self.name

    def clusters(self, device: torch.device) -> Clusters:
        return H200_CLUSTERS if self.name == "sm_90a" else B200_CLUSTERS

    def freeze(self) -> None:
        self.ready = frozenset(self.keys)

    def note(self, key: KernelKey) -> None:
        """Add to ``keys``; :class:`LibraryError` for a kernel that would have to be compiled after the warm-up."""
        if self.ready is not None and key not in self.ready:
            raise LibraryError(
                f"{key}: not among the {len(self.ready)} kernels that ran before the launcher was frozen"
            )
        self.keys.append(key)

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        self.note(key)
        if isinstance(call, HopperCall):
            _multiply_bf16(key, call)
        else:
            assert isinstance(call, Call)
            self._multiply_scaled(key, call)

    def _multiply_scaled(self, key: KernelKey, call: Call) -> None:
        shape, k = call.shape, call.k
        matrices, features = call.weights.shape[:2]
        blocks = -(-k // (4 * shape.block)) * 4
        plain = call.weight_scales.view(torch.uint8).view(matrices, -1)
        groups = call.tokens.shape[1] if call.tokens.dim() == 3 else 1
        scales = unswizzle_128x4(call.token_scales.view(torch.uint8), call.rows, blocks * groups, shape.token_tile)
        tokens = call.tokens.reshape(call.rows, groups, -1)
        values = torch.stack(
            [_unscaled(tokens[:, g], scales[:, g * blocks : (g + 1) * blocks], shape.operands) for g in range(groups)]
        )
        row_scale = call.row_scale if call.row_scale.dim() == 2 else call.row_scale.expand(call.rows)
        if call.offsets is None or call.counts is None:
            parts = [(group, slice(0, call.rows)) for group in range(call.groups)]
        else:
            starts, counts = call.offsets.tolist(), call.counts.tolist()
            parts = [(e, slice(start, start + counts[e])) for e, start in enumerate(starts)]
        quantized = torch.zeros(call.rows, call.outputs // 16, dtype=torch.uint8)
        for group, rows in parts:
            if rows.start == rows.stop:
                continue
            source = values[group if groups > 1 else 0, rows]
            plain_scales = unswizzle_128x4(plain[group], features, blocks)
            weight = _unscaled(call.weights[group], plain_scales, shape.operands)
            factor = (row_scale[:, group] if row_scale.dim() == 2 else row_scale)[rows, None]
            if shape.gated:
                alpha = call.alpha.view(-1, 2)[group]
                product = (source @ weight.T * factor).unflatten(1, (-1, 2, GATE_ROWS))
                gate, up = ((product[:, :, half] * alpha[half]).flatten(1) for half in range(2))
                assert key.limit is not None
                result = clamped_swiglu(gate, up, key.limit)
            else:
                alpha = call.alpha.view(call.groups, -1)[group]
                result = source @ weight.T * factor * alpha
            if call.row_weight is not None:
                result = result * call.row_weight[rows, None]
            if shape.output == "nvfp4":
                codes = quantize_rows(result, key.row_scale_constant)
                call.out[rows] = codes.packed
                quantized[rows] = codes.block_scale.view(torch.uint8)
            else:
                target = call.out if call.out.dim() == 2 else call.out[:, group]
                target[rows] = result.to(call.out.dtype)
        if call.out_scales is not None:
            call.out_scales.view(torch.uint8).copy_(swizzle_128x4(quantized, shape.token_tile))


def _multiply_bf16(key: KernelKey, call: HopperCall) -> None:
    """A call for Hopper: bf16 tokens, tiles of weights."""
    shape = call.shape
    features = call.out.shape[-1] * (2 if shape.gated else 1)
    kind: BlockScaledKind = "mxfp8" if shape.weights == "fp8" else "nvfp4"
    codes, scales = (unpack_fp8_tiles if shape.weights == "fp8" else unpack_tiles)(call.weights, features, call.k)
    if call.offsets is None or call.counts is None:
        parts = [(group, slice(0, call.rows)) for group in range(call.groups)]
    else:
        starts, counts = call.offsets.tolist(), call.counts.tolist()
        parts = [(e, slice(start, start + counts[e])) for e, start in enumerate(starts)]
    for group, rows in parts:
        if rows.start == rows.stop:
            continue
        taken = rows if call.sources is None else call.sources[rows].long()
        source = call.tokens[taken] if call.tokens.dim() == 2 else call.tokens[taken, group]
        target = call.out[rows] if call.out.dim() == 2 else call.out[rows, group]
        product = source.float() @ _unscaled(codes[group], scales[group], kind).T
        alpha = call.alpha.reshape(call.groups, -1)[group]
        if shape.gated:
            assert key.limit is not None
            halves = product.unflatten(1, (-1, 2, HOPPER_GATE_ROWS))
            gate, up = ((halves[:, :, half] * alpha[half]).flatten(1) for half in range(2))
            product = clamped_swiglu(gate, up, key.limit)
        else:
            product = product * alpha
        target.copy_(product)
    for copy in call.copies:
        copy.copy_(call.out)


@contextmanager
def reference_gemms(name: str = "sm_100a") -> Iterator[ReferenceLauncher]:
    """Operations inside compute in torch, as on a GPU of the architecture ``name``."""
    runner = ReferenceLauncher(name)
    with launcher.use(runner):
        yield runner


class DryLauncher(ReferenceLauncher):
    """Records what would run, its arguments packed as for a launch; results are memory as it comes."""

    def launch(self, key: KernelKey, call: GemmCall, clusters: int) -> None:
        self.note(key)
        call.arguments(clusters)


@contextmanager
def dry_gemms(name: str = "sm_100a", pin: Pin | None = None) -> Iterator[DryLauncher]:
    """Operations inside compute nothing, as on a GPU of the architecture ``name``."""
    runner = DryLauncher(name, pin=pin)
    with launcher.use(runner):
        yield runner
