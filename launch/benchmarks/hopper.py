"""Times of Hopper's GEMMs of NVFP4 or FP8 weights on a CUDA GPU, beside cuBLAS on bf16 weights, in one run.

Every GEMM is replayed from a CUDA graph in which it runs on one copy of its weights after the other: together they are
more than four times the L2 cache, as the weights of a model are. Each result is first compared with the dequantised
weights. ``--shapes`` times every kernel shape instead of the chosen one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks.kernels import measured_chip, microseconds
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher, plan
from nvfp4_sgl.cutedsl_kernels.common.shape import Output
from nvfp4_sgl.cutedsl_kernels.sm90.choose import product_shapes
from nvfp4_sgl.cutedsl_kernels.sm90.layout import TILE_K, TILE_ROWS
from nvfp4_sgl.cutedsl_kernels.sm90.shape import MIN_STAGES, WEIGHT_TILE_BYTES, KernelShape, Weights
from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.cutedsl_kernels.w8a16 import operations as fp8_operations
from nvfp4_sgl.cutedsl_kernels.w8a16.operand import Fp8TiledWeights
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.model.products import layer_products
from tests.support.released import FLASH, PRO, config_json

ROTATED_BYTES = 4 * 60 * 2**20
"""Weights that a graph reads before it reads any again: four times an H200's L2."""
LEAST_RUNS = 8
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DTYPES: dict[Output, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
HEADER = (
    "| model, TP | GEMM | groups × features × K | tokens | tile, split | us | TB/s of weights | of copy | TFLOP/s"
    " | cuBLAS bf16 us | cuBLAS / ours |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True)
class Gemm:
    """A dense or block-diagonal GEMM."""

    model: str
    ranks: int
    name: str
    groups: int
    features: int
    k: int
    output: Output


@dataclass(frozen=True)
class Row:
    """A GEMM's time; ``weight_rate`` in bytes a second, ``rate`` in operations a second."""

    gemm: Gemm
    tokens: int
    token_tile: int
    split_k: int
    us: float
    weight_rate: float
    rate: float
    cublas_us: float


def gemms(models: Sequence[str], ranks: Sequence[int]) -> Iterator[Gemm]:
    """The dense GEMMs of the models' layers, each size once a model."""
    known = {"flash": FLASH, "pro": PRO}
    for model in models:
        config = ModelConfig.from_dict(config_json(known[model]))
        seen = set()
        for count in ranks:
            for product in layer_products(config, count):
                output: Output = "fp32" if product.output == "fp32" else "bf16"
                size = (product.groups, product.features, product.k, output)
                if product.experts_per_token or size in seen:
                    continue
                seen.add(size)
                yield Gemm(model, count, product.name, *size)


class Operands:
    """Random weights of a GEMM, as many copies as a graph rotates through."""

    def __init__(self, gemm: Gemm, stored: Weights = "nvfp4"):
        self.gemm, self.stored = gemm, stored
        self.bytes = gemm.groups * gemm.features * gemm.k * WEIGHT_TILE_BYTES[stored] // (TILE_ROWS * TILE_K)
        copies = -(-ROTATED_BYTES // self.bytes)
        self.plain = [self._random() for _ in range(min(copies, 2))]
        # More copies need no other values, only other addresses.
        self.weights = [self._tiled(self.plain[i % len(self.plain)]) for i in range(copies)]
        wide = gemm.groups * gemm.features * gemm.k * 2
        self.bf16 = [
            torch.randn(gemm.groups, gemm.features, gemm.k, device="cuda").bfloat16()
            for _ in range(-(-ROTATED_BYTES // wide))
        ]

    def _random(self) -> NvFp4Tensor | MxFp8Tensor:
        shape = (self.gemm.groups, self.gemm.features, self.gemm.k)
        if self.stored == "fp8":
            wide = torch.randint(0, 0x7F, shape, dtype=torch.uint8, device="cuda")
            wide |= torch.randint(0, 2, shape, dtype=torch.uint8, device="cuda") << 7
            exponents = torch.full((*shape[:2], shape[2] // 32), 127 - 14, dtype=torch.uint8, device="cuda")
            return MxFp8Tensor(wide.view(torch.float8_e4m3fn), exponents)
        codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(0x30, 0x40, (*shape[:2], shape[2] // 16), dtype=torch.uint8, device="cuda")
        alpha = torch.rand(shape[:2], device="cuda") * 0.01
        return NvFp4Tensor(codes, scales.view(torch.float8_e4m3fn), alpha)

    def _tiled(self, plain: NvFp4Tensor | MxFp8Tensor) -> TiledWeights | Fp8TiledWeights:
        if isinstance(plain, MxFp8Tensor):
            return Fp8TiledWeights.of(plain)
        return TiledWeights.grouped(plain.packed, plain.block_scale, plain.global_scale)

    def run(self, copy: int, tokens: Tensor, out: Tensor) -> Tensor:
        """The GEMM of a copy of the weights."""
        weights = self.weights[copy]
        if isinstance(weights, Fp8TiledWeights):
            return fp8_operations.product(tokens, weights, out=out)
        return operations.grouped_product(tokens, weights, out=out)

    def tokens(self, count: int) -> Tensor:
        return torch.randn(count, self.gemm.groups, self.gemm.k, device="cuda").bfloat16()

    def check(self, tokens: Tensor, out: Tensor) -> None:
        """Compare the first copy's result with the dequantised weights.

        Raises:
            AssertionError: it differs by more than rounding.
        """
        found = self.run(0, tokens, out)
        expected = torch.einsum("tgk,gfk->tgf", tokens.float(), self.plain[0].dequantize())
        error = (found.float() - expected).abs().max() / expected.abs().max()
        assert float(error) < 2**-7, f"{self.gemm}, {len(tokens)} tokens: error {float(error):.3g} of the largest"


def rotating(runs: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one of ``runs``, in a graph that holds each, some several times."""
    many = list(runs) * -(-LEAST_RUNS // len(runs))
    return microseconds(lambda: [run() for run in many]) / len(many)


def measure(operands: Operands, count: int, shapes: Sequence[KernelShape] | None) -> Iterator[Row]:
    gemm, tokens = operands.gemm, operands.tokens(count)
    dtype = DTYPES[gemm.output]
    out = tokens.new_empty(count, gemm.groups, gemm.features, dtype=dtype)
    batch = tokens.transpose(0, 1).contiguous()
    cublas = rotating([partial(torch.bmm, batch, w.transpose(1, 2)) for w in operands.bf16])
    clusters = launcher.current().clusters(out.device)
    planned = plan.plan_w4a16(gemm.features, gemm.k, count, gemm.groups, gemm.output, clusters, operands.stored)
    for shape in shapes or [planned]:
        with mock.patch.object(plan, "plan_w4a16", mock.Mock(return_value=shape)):
            operands.check(tokens, out)
            us = rotating([partial(operands.run, copy, tokens, out) for copy in range(len(operands.weights))])
        elements = gemm.groups * gemm.features * gemm.k
        yield Row(
            gemm, count, shape.token_tile, shape.split_k, us, operands.bytes / us * 1e6,
            2 * count * elements / us * 1e6, cublas,
        )  # fmt: skip


def text(row: Row, bandwidth: float) -> str:
    gemm = row.gemm
    return (
        f"| {gemm.model}, {gemm.ranks} | {gemm.name} | {gemm.groups} × {gemm.features} × {gemm.k} | {row.tokens}"
        f" | {row.token_tile}, {row.split_k} | {row.us:.1f} | {row.weight_rate / 1e12:.2f}"
        f" | {row.weight_rate / bandwidth:.0%} | {row.rate / 1e12:.0f} | {row.cublas_us:.1f}"
        f" | {row.cublas_us / row.us:.2f} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_hopper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("flash", "pro"), default=["flash"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="sizes of --tp-size")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--weights", choices=tuple(WEIGHT_TILE_BYTES), default="nvfp4", help="how they are stored")
    parser.add_argument("--shapes", action="store_true", help="every kernel shape, not the chosen one alone")
    parser.add_argument("--json", type=Path, help="also as JSON")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; these kernels run on Hopper GPUs")
    chip = measured_chip()
    print(f"{chip.name}: copy {chip.bandwidth / 1e12:.2f} TB/s, bf16 products {chip.rate / 1e12:.0f} TFLOP/s\n{HEADER}")
    rows = []
    for gemm in gemms(args.models, args.ranks):
        operands = Operands(gemm, args.weights)
        for count in args.tokens:
            possible = product_shapes(gemm.k, count, gemm.output, args.weights)
            every = [s for s in possible if s.stages >= MIN_STAGES]
            for row in measure(operands, count, every if args.shapes else None):
                rows.append(row)
                print(text(row, chip.bandwidth), flush=True)
        del operands
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"chip": asdict(chip), "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
