"""Times of Hopper's GEMMs of NVFP4 or FP8 weights on a CUDA GPU, beside Marlin, humming and cuBLAS, in one run.

Every GEMM is replayed from a CUDA graph in which it runs on one copy of its weights after the other: together they are
more than four times the L2 cache, as the weights of a model are. Each result is first compared with the dequantised
weights. ``--shapes`` times every kernel shape of the dense GEMMs instead of the chosen one. Then come the experts, in
NVFP4 (:mod:`.hopper_experts`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from benchmarks import hopper_experts
from benchmarks.hopper_goals import Timed, verdict
from benchmarks.hopper_runs import ROTATED_BYTES, Parts, compile_all, rotating
from benchmarks.kernel_report import Chip
from benchmarks.kernels import measured_chip
from benchmarks.peers.humming import Dense as HummingDense
from benchmarks.peers.humming import Humming
from benchmarks.peers.marlin import Dense as MarlinDense
from benchmarks.peers.marlin import Marlin
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher, plan
from nvfp4_sgl.cutedsl_kernels.common.shape import Output
from nvfp4_sgl.cutedsl_kernels.sm90.choose import gemm_shapes
from nvfp4_sgl.cutedsl_kernels.sm90.layout import TILE_K, TILE_ROWS
from nvfp4_sgl.cutedsl_kernels.sm90.shape import MIN_STAGES, WEIGHT_TILE_BYTES, KernelShape, WeightKind
from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.cutedsl_kernels.w8a16 import operations as fp8_operations
from nvfp4_sgl.cutedsl_kernels.w8a16.operand import Fp8TiledWeights
from nvfp4_sgl.formats.checks import keeping_nothing
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.weights.gemms import distinct_gemms
from tests.support.released import FLASH, PRO, config_json

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DTYPES: dict[Output, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
NOTE = (
    "Dense GEMMs: Marlin and humming run one launch a group and write bf16 where ours writes fp32; their matrices have"
    " one global scale each, ours one a feature."
)
HEADER = (
    "| model, TP | GEMM | groups × features × K | tokens | tile, split, CTAs an SM | us | TB/s of weights | of copy"
    " | TFLOP/s | cuBLAS bf16 us | cuBLAS / ours | Marlin us | Marlin / ours | humming us | humming / ours |\n"
    + "| --- " * 15
    + "|"
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
    """A GEMM's time, and those of peers that have one; ``weight_rate`` in bytes, ``rate`` in operations a second."""

    gemm: Gemm
    tokens: int
    token_tile: int
    split_k: int
    ctas: int
    us: float
    weight_rate: float
    rate: float
    cublas_us: float
    marlin_us: float | None
    humming_us: float | None


def gemms(models: Sequence[str], ranks: Sequence[int]) -> Iterator[Gemm]:
    """The dense GEMMs of the models' layers, each size once a model."""
    known = {"flash": FLASH, "pro": PRO}
    for model in models:
        config = ModelConfig.from_dict(config_json(known[model]))
        seen = set()
        for count in ranks:
            for product in distinct_gemms(config, count):
                output: Output = "fp32" if product.output == "fp32" else "bf16"
                size = (product.groups, product.features, product.k, output)
                if product.experts_per_token or size in seen:
                    continue
                seen.add(size)
                yield Gemm(model, count, product.name, *size)


class Operands:
    """Random weights of a GEMM, as many copies as a graph rotates through."""

    def __init__(self, gemm: Gemm, stored: WeightKind = "nvfp4", device: str = "cuda"):
        self.gemm, self.stored, self.device = gemm, stored, device
        self.bytes = gemm.groups * gemm.features * gemm.k * WEIGHT_TILE_BYTES[stored] // (TILE_ROWS * TILE_K)
        copies = -(-ROTATED_BYTES // self.bytes)
        self.plain = [self._random() for _ in range(min(copies, 2))]
        # More copies need no other values, only other addresses.
        self.weights = [self._tiled(self.plain[i % len(self.plain)]) for i in range(copies)]

    @cached_property
    def bf16(self) -> list[Tensor]:
        """Random bf16 weights of the same size, for cuBLAS."""
        shape = (self.gemm.groups, self.gemm.features, self.gemm.k)
        copies = -(-ROTATED_BYTES // (2 * math.prod(shape)))
        return [torch.randn(shape, device=self.device).bfloat16() for _ in range(copies)]

    def _random(self) -> NvFp4Tensor | MxFp8Tensor:
        shape = (self.gemm.groups, self.gemm.features, self.gemm.k)
        if self.stored == "fp8":
            wide = torch.randint(0, 0x7F, shape, dtype=torch.uint8, device=self.device)
            wide |= torch.randint(0, 2, shape, dtype=torch.uint8, device=self.device) << 7
            exponents = torch.full((*shape[:2], shape[2] // 32), 127 - 14, dtype=torch.uint8, device=self.device)
            return MxFp8Tensor(wide.view(torch.float8_e4m3fn), exponents)
        codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), dtype=torch.uint8, device=self.device)
        scales = torch.randint(0x30, 0x40, (*shape[:2], shape[2] // 16), dtype=torch.uint8, device=self.device)
        alpha = torch.rand(shape[:2], device=self.device) * 0.01
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
        return torch.randn(count, self.gemm.groups, self.gemm.k, device=self.device).bfloat16()

    def check(self, tokens: Tensor, out: Tensor) -> None:
        """Compare the first copy's result with the dequantised weights.

        Raises:
            AssertionError: it differs by more than rounding.
        """
        found = self.run(0, tokens, out)
        expected = torch.einsum("tgk,gfk->tgf", tokens.float(), self.plain[0].dequantize())
        error = (found.float() - expected).abs().max() / expected.abs().max()
        assert float(error) < 2**-7, f"{self.gemm}, {len(tokens)} tokens: error {float(error):.3g} of the largest"


def planned(gemm: Gemm, tokens: int, stored: WeightKind, device: str = "cuda") -> KernelShape:
    """The kernel that the operations plan."""
    clusters = launcher.current().clusters(torch.device(device))
    return plan.plan_w4a16(gemm.features, gemm.k, tokens, gemm.groups, gemm.output, clusters, stored)


def wanted_shapes(args: argparse.Namespace, gemm: Gemm, tokens: int) -> list[KernelShape]:
    """The kernels to time: with ``--shapes`` all that could run it, else the planned one."""
    if not args.shapes:
        return [planned(gemm, tokens, args.weights)]
    return [s for s in gemm_shapes(gemm.k, tokens, gemm.output, args.weights) if s.stages >= MIN_STAGES]


@dataclass(frozen=True)
class Peers:
    """The peers of a GEMM, with its weights in the order of each; None for a peer that failed."""

    marlin: Marlin
    humming: Humming
    for_marlin: MarlinDense | None = None
    for_humming: HummingDense | None = None

    def prepared(self, operands: Operands, counts: Sequence[int]) -> Peers:
        """The same with the weights of a GEMM, as many copies as ours, for these numbers of tokens."""
        plain, copies = operands.plain[0], len(operands.weights)
        return replace(
            self,
            for_marlin=self.marlin.attempt(partial(MarlinDense, plain, copies)),
            for_humming=self.humming.attempt(partial(HummingDense, plain, copies, counts)),
        )

    def times(self, batch: Tensor) -> tuple[float | None, float | None]:
        """Microseconds of Marlin and of humming, of tokens [G, T, K]."""
        marlin, humming = self.for_marlin, self.for_humming
        return (
            self.marlin.attempt(partial(time_peer, marlin, batch)) if marlin else None,
            self.humming.attempt(partial(time_peer, humming, batch)) if humming else None,
        )


def time_peer(theirs: MarlinDense | HummingDense, batch: Tensor) -> float:
    """Microseconds of a peer, of tokens [G, T, K].

    Raises:
        ValueError: its result is not that of the dequantised weights.
    """
    tokens = batch.unbind()
    theirs.check(tokens)
    return rotating([partial(theirs.run, copy, tokens) for copy in range(len(theirs.copies))])


def measure(operands: Operands, count: int, shapes: Sequence[KernelShape], peers: Peers) -> Iterator[Row]:
    gemm, tokens = operands.gemm, operands.tokens(count)
    dtype = DTYPES[gemm.output]
    out = tokens.new_empty(count, gemm.groups, gemm.features, dtype=dtype)
    batch = tokens.transpose(0, 1).contiguous()
    cublas = rotating([partial(torch.bmm, batch, w.transpose(1, 2)) for w in operands.bf16])
    theirs = peers.times(batch)
    for shape in shapes:
        with keeping_nothing(), mock.patch.object(plan, "plan_w4a16", mock.Mock(return_value=shape)):
            operands.check(tokens, out)
            us = rotating([partial(operands.run, copy, tokens, out) for copy in range(len(operands.weights))])
        elements = gemm.groups * gemm.features * gemm.k
        yield Row(
            gemm, count, shape.token_tile, shape.split_k, shape.ctas_per_sm, us, operands.bytes / us * 1e6,
            2 * count * elements / us * 1e6, cublas, *theirs,
        )  # fmt: skip


def text(row: Row, bandwidth: float) -> str:
    gemm = row.gemm
    peers = [f"{us:.1f} | {us / row.us:.2f}" if us else "- | -" for us in (row.marlin_us, row.humming_us)]
    return (
        f"| {gemm.model}, {gemm.ranks} | {gemm.name} | {gemm.groups} × {gemm.features} × {gemm.k} | {row.tokens}"
        f" | {row.token_tile}, {row.split_k}, {row.ctas} | {row.us:.1f} | {row.weight_rate / 1e12:.2f}"
        f" | {row.weight_rate / bandwidth:.0%} | {row.rate / 1e12:.0f} | {row.cublas_us:.1f}"
        f" | {row.cublas_us / row.us:.2f} | {' | '.join(peers)} |"
    )


def timed(chip: Chip, row: Row) -> Timed:
    """A row as goals take it."""
    gemm = row.gemm
    what = f"{gemm.model}, {gemm.ranks}: {gemm.name} at {row.tokens}"
    of_marlin = row.marlin_us / row.us if row.marlin_us else None
    megabytes = row.weight_rate * row.us / 1e12
    rates = row.weight_rate / chip.bandwidth, row.rate / chip.rate
    return Timed(what, row.tokens, row.tokens, megabytes, of_marlin, *rates)


def timed_experts(chip: Chip, row: hopper_experts.Row) -> Timed:
    """The same of experts: Marlin's whole mixture beside ours."""
    what = f"{row.layer.model}, {row.layer.ranks}: experts at {row.tokens}"
    of_marlin = row.marlin_us / row.mixture_us if row.marlin_us else None
    rates = row.weight_rate / chip.bandwidth, row.rate / chip.rate
    return Timed(what, row.tokens, row.pairs / row.visited, row.weight_bytes / 1e6, of_marlin, *rates, is_experts=True)


def compile_ahead(args: argparse.Namespace) -> None:
    """Compile our kernels in parallel; whatever this misses is compiled at its first launch."""
    started, shapes, layers = time.monotonic(), [], experts_of(args)
    if not args.experts:
        for gemm in gemms(args.models, args.tp):
            for count in args.tokens:
                shapes += wanted_shapes(args, gemm, count)
    for layer in layers:
        for count in [*args.tokens, hopper_experts.CHECKED_TOKENS]:
            shapes += layer.shapes(count)
    compile_all(shapes, layers[0].limit if layers else None)
    print(f"our kernels were ready after {time.monotonic() - started:.0f} s", flush=True)


def experts_of(args: argparse.Namespace) -> list[hopper_experts.Layer]:
    """The layers whose experts are wanted."""
    if args.dense or args.weights != "nvfp4":
        return []
    return list(hopper_experts.layers(args.models, args.tp))


def run_dense(args: argparse.Namespace, chip: Chip, peers: Peers, parts: Parts) -> Iterator[Row]:
    """Measure the dense GEMMs, each a part of its own; rows are printed as they come."""
    print(f"\n{NOTE}\n\n{HEADER}", flush=True)
    for gemm in gemms(args.models, args.tp):
        with parts.part(str(gemm)):
            yield from run_gemm(args, gemm, chip, peers)
        torch.cuda.empty_cache()


def run_gemm(args: argparse.Namespace, gemm: Gemm, chip: Chip, peers: Peers) -> Iterator[Row]:
    """Measure a GEMM for every number of tokens."""
    operands = Operands(gemm, args.weights)
    prepared = peers.prepared(operands, args.tokens)
    for count in args.tokens:
        for row in measure(operands, count, wanted_shapes(args, gemm, count), prepared):
            print(text(row, chip.bandwidth), flush=True)
            yield row


def run_experts(args: argparse.Namespace, chip: Chip, marlin: Marlin, parts: Parts) -> Iterator[hopper_experts.Row]:
    """Measure the experts, each layer a part of its own."""
    layers = experts_of(args)
    if layers:
        print(f"\n{hopper_experts.NOTE}\n", flush=True)
    for layer in layers:
        with parts.part(str(layer)):
            yield from hopper_experts.run_layer(layer, args.tokens, chip.bandwidth, marlin)
        torch.cuda.empty_cache()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch/bench_hopper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=("flash", "pro"), default=["flash"], help="whose shapes")
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4], metavar="N", help="tensor-parallel sizes")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="tokens of a pass")
    parser.add_argument("--weights", choices=tuple(WEIGHT_TILE_BYTES), default="nvfp4", help="nvfp4 or fp8")
    parser.add_argument(
        "--shapes", action="store_true", help="every kernel shape of dense GEMMs, not the chosen one alone"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--dense", action="store_true", help="the dense GEMMs only")
    only.add_argument("--experts", action="store_true", help="the experts' GEMMs only")
    parser.add_argument(
        "--no-marlin", action="store_true", help="without Marlin, which nvcc compiles at first, in minutes"
    )
    parser.add_argument(
        "--no-humming", action="store_true", help="without humming, which is timed if it is installed, in dense NVFP4"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the times here, as JSON")
    return parser


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    args = parser.parse_args(arguments)
    if args.experts and args.weights != "nvfp4":
        parser.error(f"--experts: expected --weights nvfp4, as experts are stored, found {args.weights}")
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; these kernels run on Hopper GPUs")
    parts, marlin = Parts(), Marlin(not args.no_marlin)
    humming = Humming(not (args.no_humming or args.experts or args.weights != "nvfp4"))
    marlin.start(dense=not args.experts, experts=bool(experts_of(args)))
    humming.start([(gemm.features, gemm.k) for gemm in gemms(args.models, args.tp)], args.tokens)
    with parts.part("compiling ahead"):
        compile_ahead(args)
    marlin.wait()
    humming.wait()
    chip = measured_chip()
    print(f"{chip.name}: copy {chip.bandwidth / 1e12:.2f} TB/s, bf16 products {chip.rate / 1e12:.0f} TFLOP/s")
    rows: list[Row] = []
    expert_rows: list[hopper_experts.Row] = []

    def keep() -> None:
        """Whatever comes to an end early leaves what it has found."""
        if args.output:
            found = {"rows": [asdict(row) for row in rows], "experts": [asdict(row) for row in expert_rows]}
            args.output.write_text(json.dumps({"chip": asdict(chip), **found}, indent=1))

    if not args.experts:
        for row in run_dense(args, chip, Peers(marlin, humming), parts):
            rows.append(row)
            keep()
    for expert_row in run_experts(args, chip, marlin, parts):
        expert_rows.append(expert_row)
        keep()
    if not args.shapes:
        rated = [timed(chip, row) for row in rows] + [timed_experts(chip, row) for row in expert_rows]
        print("\nGoals:", *verdict(rated), sep="\n", flush=True)
    for failed in parts.failed:
        print(f"failed: {failed}", flush=True)
    return 1 if parts.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
