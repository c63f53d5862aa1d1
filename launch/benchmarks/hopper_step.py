"""Times of Hopper's GEMMs as a decode step runs them: behind another kernel, during which they fetch weights.

What a GEMM adds to a CUDA graph is measured, for every kernel shape: the graph's time with it less that without it.
Dense GEMMs follow a kernel that waits for 8 µs, as they follow attention or a hyper-connection; experts follow the
same, then each other, each launch with other experts, spread uniformly. Weights are rotated through more than L2.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.hopper import DTYPES, gemms
from benchmarks.hopper_runs import ROTATED_BYTES, compile_all
from benchmarks.kernels import microseconds
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher, plan
from nvfp4_sgl.cutedsl_kernels.sm90.choose import choose_experts, choose_product, expert_shapes, product_shapes
from nvfp4_sgl.cutedsl_kernels.sm90.layout import TILE_BYTES, TILE_K, TILE_ROWS
from nvfp4_sgl.cutedsl_kernels.sm90.shape import MIN_STAGES, KernelShape
from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.model.products import layer_products
from nvfp4_sgl.triton_kernels.common.overlap import OVERLAPPED, after_previous
from nvfp4_sgl.triton_kernels.experts.permutation import padded_rows
from tests.support.released import FLASH, config_json

WAIT_NS = 8000
LIMIT = 10.0
VISITS = 7
"""Experts of a token, the shared one included."""
EXPERT_ROUTES = 16
"""Launches of a graph with other experts each."""


@triton.jit
def _wait(out, nanoseconds):
    """A kernel that takes so long on one multiprocessor, and lets the next one begin at once."""
    after_previous()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = tl.extra.cuda.globaltimer()
    tl.store(out, now)


@dataclass(frozen=True)
class Row:
    """What a GEMM adds to a step, in µs; ``chosen`` is whether the plan takes this shape."""

    name: str
    tokens: int
    token_tile: int
    split_k: int
    us: float
    weight_rate: float
    chosen: bool


def waiting(out: Tensor) -> None:
    _wait[(1,)](out, WAIT_NS, num_warps=1, **OVERLAPPED)


def added(before: Callable[[int], object], run: Callable[[int], object], copies: int) -> float:
    """Microseconds that ``run`` adds behind ``before``, each called with the number of a copy."""

    def both() -> None:
        for copy in range(copies):
            before(copy)
            run(copy)

    return (microseconds(both) - microseconds(lambda: [before(copy) for copy in range(copies)])) / copies


def random_tiles(groups: int, features: int, k: int) -> Tensor:
    """Tiles of matrices of random bytes that hold no NaN as scales."""
    shape = (groups, -(-features // TILE_ROWS), -(-k // TILE_K), TILE_BYTES)
    return torch.randint(0, 0x7E, shape, dtype=torch.uint8, device="cuda")


@dataclass(frozen=True)
class Case:
    """A GEMM for so many tokens: the shapes to try, and how a launch of a copy is made and what comes before it.

    size: bytes of weights that a launch reads.
    """

    name: str
    tokens: int
    size: int
    copies: int
    chosen: KernelShape
    shapes: Sequence[KernelShape]
    before: Callable[[int], object]
    run: Callable[[int], object]

    def measure(self, shape: KernelShape) -> float:
        """What the GEMM adds with this shape; others are as planned."""
        product, experts = plan.plan_w4a16, plan.plan_w4a16_experts

        def planned(*arguments: Any) -> KernelShape:
            found = (experts if self.chosen.grouped else product)(*arguments)
            return shape if found == self.chosen else found

        name = "plan_w4a16_experts" if self.chosen.grouped else "plan_w4a16"
        with mock.patch.object(plan, name, planned):
            return added(self.before, self.run, self.copies)


def dense(ranks: int, tokens: Sequence[int]) -> Iterator[Case]:
    """The dense GEMMs behind a kernel that waits."""
    clusters = launcher.current().clusters(torch.device("cuda"))
    clock = torch.zeros(1, dtype=torch.int64, device="cuda")
    for gemm in gemms(["flash"], [ranks]):
        size = gemm.groups * gemm.features * gemm.k * 9 // 16
        copies = max(-(-ROTATED_BYTES // size), 8)
        scale = torch.ones(gemm.groups, gemm.features, device="cuda")
        weights = [
            TiledWeights(random_tiles(gemm.groups, gemm.features, gemm.k), scale, gemm.features, gemm.k)
            for _ in range(copies)
        ]
        for count in tokens:
            x = torch.randn(count, gemm.groups, gemm.k, device="cuda").bfloat16()
            out = x.new_empty(count, gemm.groups, gemm.features, dtype=DTYPES[gemm.output])
            yield Case(
                f"{gemm.name} {gemm.groups} × {gemm.features} × {gemm.k}",
                count,
                size,
                copies,
                choose_product(gemm.features, gemm.k, count, gemm.groups, gemm.output, clusters),
                list(product_shapes(gemm.k, count, gemm.output)),
                lambda copy: waiting(clock),
                partial(multiply, x, weights, out),
            )


def multiply(x: Tensor, weights: Sequence[TiledWeights], out: Tensor, copy: int) -> None:
    operations.grouped_product(x, weights[copy], out=out)


def experts(ranks: int, tokens: Sequence[int]) -> Iterator[Case]:
    """Gates and ups behind a kernel that waits, downs behind those."""
    clusters = launcher.current().clusters(torch.device("cuda"))
    config = ModelConfig.from_dict(config_json(FLASH))
    up, down = (product for product in layer_products(config, ranks) if product.experts_per_token)
    groups, hidden = up.groups, up.features
    w13 = TiledWeights(random_tiles(groups, 2 * hidden, up.k), torch.ones(groups, 2, device="cuda"), 2 * hidden, up.k)
    w2 = TiledWeights(
        random_tiles(groups, down.features, down.k), torch.ones(groups, device="cuda"), down.features, down.k
    )
    clock = torch.zeros(1, dtype=torch.int64, device="cuda")
    for count in tokens:
        tile = operations.w4a16_expert_token_tile_for(count * VISITS, groups)
        routes, visited = [], 0
        for _ in range(EXPERT_ROUTES):
            picks = torch.stack([torch.randperm(groups - 1)[: VISITS - 1] for _ in range(count)])
            counts = torch.bincount(picks.flatten(), minlength=groups)
            counts[-1] = count
            padded = (counts + tile - 1) // tile * tile
            routes.append(((padded.cumsum(0) - padded).int().cuda(), counts.int().cuda()))
            visited += int((counts > 0).sum())
        rows = padded_rows(count * VISITS, groups, tile)
        x = torch.randn(rows, up.k, device="cuda").bfloat16()
        h = torch.randn(rows, hidden, device="cuda").bfloat16()
        out = x.new_empty(rows, down.features)
        first = partial(gate_up, x, tile, routes, w13, h)

        def before_down(copy: int, first: Callable[[int], None] = first) -> None:
            waiting(clock)
            first(copy)

        for product, features, before, run in (
            (up, 2 * hidden, lambda copy: waiting(clock), first),
            (down, down.features, before_down, partial(downward, h, tile, routes, w2, out)),
        ):
            yield Case(
                f"{product.name} {groups} × {features} × {product.k}",
                count,
                visited * features * product.k * 9 // 16 // EXPERT_ROUTES,
                EXPERT_ROUTES,
                choose_experts(product.features, product.k, rows, groups, product is up, tile, "bf16", clusters),
                list(expert_shapes(product.k, tile, product is up, "bf16")),
                before,
                run,
            )


Routes = Sequence[tuple[Tensor, Tensor]]


def gate_up(x: Tensor, tile: int, routes: Routes, weights: TiledWeights, out: Tensor, copy: int) -> None:
    offsets, counts = routes[copy]
    operations.expert_gate_up(x, tile, offsets, counts, weights, LIMIT, out=out)


def downward(x: Tensor, tile: int, routes: Routes, weights: TiledWeights, out: Tensor, copy: int) -> None:
    offsets, counts = routes[copy]
    operations.expert_down(x, tile, offsets, counts, weights, out=out)


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_hopper_step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="--tp-size")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--json", type=Path, help="also as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; these kernels run on Hopper GPUs")
    shapes = [
        shape
        for k, count in ((k, count) for k in (1024, 4096, 8192) for count in args.tokens)
        for output in ("bf16", "fp32")
        for shape in product_shapes(k, count, output)
    ]
    tiles = {operations.w4a16_expert_token_tile_for(count * VISITS, 257) for count in args.tokens}
    shapes += [s for tile in tiles for gated in (True, False) for s in expert_shapes(4096, tile, gated, "bf16")]
    compile_all([shape for shape in shapes if shape.stages >= MIN_STAGES], LIMIT)
    print("| GEMM | tokens | tile, split | adds, µs | weights, TB/s | |\n| --- | --- | --- | --- | --- | --- |")
    rows = []
    for case in chain(experts(args.ranks, args.tokens), dense(args.ranks, args.tokens)):
        for shape in case.shapes:
            if shape.stages < MIN_STAGES:
                continue
            us = case.measure(shape)
            rate, chosen = case.size / us * 1e6, shape == case.chosen
            rows.append(Row(case.name, case.tokens, shape.token_tile, shape.split_k, round(us, 2), rate, chosen))
            print(
                f"| {case.name} | {case.tokens} | {shape.token_tile}, {shape.split_k} | {us:.2f} | {rate / 1e12:.2f}"
                f" | {'chosen' if chosen else ''} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
