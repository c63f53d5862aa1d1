"""Times of Hopper's GEMMs of NVFP4 experts, gate and up with SwiGLU and down, beside Marlin's whole mixture.

Each token takes routed experts at random, all equally likely, and the shared one, which is the last group, as in the
model. Runs of a graph use other routes and alternate copies of the layer: until a run reads the shared expert again,
four times the L2 cache has been read. Marlin gets the shared expert as one more, always chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.families import relative_error
from benchmarks.hopper_runs import ROTATED_BYTES, rotating
from benchmarks.peers import marlin as peer
from benchmarks.peers.attempts import require_near
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher, plan
from nvfp4_sgl.cutedsl_kernels.sm90.layout import TILE_BYTES, TILE_K, TILE_ROWS
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.cutedsl_kernels.w4a16 import operations
from nvfp4_sgl.cutedsl_kernels.w4a16.operand import TiledWeights
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.ops.swiglu import clamped_swiglu
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.experts.permutation import padded_rows
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows
from nvfp4_sgl.weights.gemms import distinct_gemms
from tests.support.released import FLASH, PRO, config_json

ROUTES = 16
"""Runs of a graph, each with routes of its own."""
DISTINCT = 3
"""Experts with values of their own; the others have theirs at other addresses, and other global scales."""
CHECKED_TOKENS = 64
LIMIT = 2.0**-7
MARLIN_LIMIT = 0.02
"""Marlin rounds gates, ups and its SwiGLU's parts to bf16, and adds the parts of split sums in bf16."""
NOTE = (
    "Experts: µs of the two GEMMs, each alone. Where the first gathers no tokens, they are sorted by expert before it."
    " `mixture` has both, copies of tokens to their experts' rows where they are needed, and the weighted sum. The sort"
    " is not in it, since ours sorts with the router."
    " Marlin's time is of its whole mixture: the sort, gate and up, SwiGLU, down, sum. The shared expert is"
    " one more of its experts, always chosen. Weights are those of visited experts, rates those of the two GEMMs."
)
HEADER = (
    "| model, TP | tokens | pairs | experts visited | tile | gate/up us | down us | MB of weights | TB/s"
    " | of copy | TFLOP/s | mixture us | Marlin us | Marlin / mixture |\n" + "| --- " * 14 + "|"
)


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer's experts on a rank; the shared one is the last."""

    model: str
    ranks: int
    experts: int
    visits: int
    width: int
    inner: int
    limit: float

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's matrices as ours are stored, in whole tiles."""
        up = -(-2 * self.inner // TILE_ROWS) * -(-self.width // TILE_K)
        down = -(-self.width // TILE_ROWS) * -(-self.inner // TILE_K)
        return (up + down) * TILE_BYTES

    @property
    def copies(self) -> int:
        """Layers to rotate through, so that a token's experts are not in L2 when their turn comes again."""
        return min(-(-ROTATED_BYTES // (self.visits * self.expert_bytes)), ROUTES)

    def tile(self, tokens: int) -> int:
        return operations.w4a16_expert_token_tile_for(tokens * self.visits, self.experts)

    def rows(self, tokens: int) -> int:
        return padded_rows(tokens * self.visits, self.experts, self.tile(tokens))

    def shapes(self, tokens: int, device: str = "cuda") -> list[KernelShape]:
        """The kernels that the operations plan for the first GEMM and the second."""
        rows, tile = self.rows(tokens), self.tile(tokens)
        clusters = launcher.current().clusters(torch.device(device))
        sizes = ((self.inner, self.width, True), (self.width, self.inner, False))
        return [
            plan.plan_w4a16_experts(
                features,
                k,
                rows,
                self.experts,
                gated,
                tile,
                "bf16",
                clusters,
                gated and plan.w4a16_gathers(tile),
                counts_ahead=not gated,
            )
            for features, k, gated in sizes
        ]


def layers(models: Sequence[str], ranks: Sequence[int]) -> Iterator[Layer]:
    """The experts of the models, by the number of ranks."""
    known = {"flash": FLASH, "pro": PRO}
    for model in models:
        config = ModelConfig.from_dict(config_json(known[model]))
        for count in ranks:
            up, down = (product for product in distinct_gemms(config, count) if product.experts_per_token)
            assert up.gated and up.shared and (down.k, down.features) == (up.features, up.k)
            yield Layer(model, count, up.groups, up.experts_per_token, up.k, up.features, config.swiglu_limit)


@dataclass(frozen=True)
class Route:
    """The rows of token-expert pairs.

    ids: int32 [T, k], the experts of each token. destination: int32 [T, k], their rows. sources: int32 [rows], the
    token of each row, -1 for none. offsets, counts: int32 [E].
    """

    ids: Tensor
    destination: Tensor
    sources: Tensor
    offsets: Tensor
    counts: Tensor


def random_route(layer: Layer, tokens: int, tile: int, device: str = "cuda") -> Route:
    """Experts at random for each token, none of them twice, then the shared one."""
    routed = torch.rand(tokens, layer.experts - 1, device=device).topk(layer.visits - 1, dim=1).indices
    ids = torch.nn.functional.pad(routed, (0, 1), value=layer.experts - 1)
    flat = ids.flatten()
    counts = torch.bincount(flat, minlength=layer.experts)
    padded = (counts + tile - 1) // tile * tile
    offsets = padded.cumsum(0) - padded
    order = flat.argsort(stable=True)
    # A pair's number in the order of experts, less those of the experts before its own.
    rank = torch.arange(len(flat), device=device) - (counts.cumsum(0) - counts)[flat[order]]
    destination = torch.empty_like(flat)
    destination[order] = offsets[flat[order]] + rank
    sources = flat.new_full((padded_rows(len(flat), layer.experts, tile),), -1)
    sources[destination] = torch.arange(len(flat), device=device) // ids.shape[1]
    return Route(ids.int(), destination.view(ids.shape).int(), sources.int(), offsets.int(), counts.int())


class Weights:
    """Random experts, ours and Marlin's, of the same values.

    Expert e has the codes and block scales of ``e % DISTINCT`` and global scales of its own, values of bf16.
    """

    def __init__(self, layer: Layer, device: str = "cuda"):
        self.layer = layer
        self.gate_up = self._random(2 * layer.inner, layer.width, device)
        self.down = self._random(layer.width, layer.inner, device)
        numbers = torch.arange(layer.experts, device=device)
        self.picks = numbers % DISTINCT
        self.alphas = (1 + numbers % 128 / 128) * 2.0**-7
        first = self._tiled(torch.device(device))
        self.tiled = [first] + [self._copied(*first) for _ in range(layer.copies - 1)]

    @staticmethod
    def _random(features: int, k: int, device: str) -> NvFp4Tensor:
        codes = torch.randint(0, 256, (DISTINCT, features, k // 2), dtype=torch.uint8, device=device)
        scales = torch.randint(0x30, 0x40, (DISTINCT, features, k // 16), dtype=torch.uint8, device=device)
        return NvFp4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.ones(DISTINCT, device=device))

    def _tiled(self, device: torch.device) -> tuple[TiledWeights, TiledWeights]:
        layer, halves = self.layer, (2, self.layer.inner)
        ups = TiledWeights.allocate_gated_experts(DISTINCT, layer.inner, layer.width, device)
        downs = TiledWeights.allocate_experts(DISTINCT, layer.width, layer.inner, device)
        scales = self.gate_up.block_scale.view(torch.uint8).unflatten(1, halves).view(torch.float8_e4m3fn)
        codes, ones = self.gate_up.packed.unflatten(1, halves), torch.ones(DISTINCT, 2, device=device)
        ups.put_gated_experts(0, codes, scales, ones)
        downs.put_experts(0, self.down.packed, self.down.block_scale, ones[:, 0])
        both = self.alphas[:, None].expand(-1, 2).contiguous()
        return (
            TiledWeights(ups.tiles[self.picks], both, ups.features, ups.k),
            TiledWeights(downs.tiles[self.picks], self.alphas, downs.features, downs.k),
        )

    @staticmethod
    def _copied(ups: TiledWeights, downs: TiledWeights) -> tuple[TiledWeights, TiledWeights]:
        first, second = (TiledWeights(w.tiles.clone(), w.scale, w.features, w.k) for w in (ups, downs))
        return first, second

    def for_marlin(self) -> list[peer.Experts]:
        """The same for Marlin, as many copies."""
        first = peer.Experts.of(self.gate_up, self.down, self.picks, self.alphas)
        return [first] + [first.copy() for _ in range(self.layer.copies - 1)]

    def expected(self, x: Tensor, route: Route) -> Tensor:
        """The sum of each token's experts by dequantised weights, fp32 [T, K]; the SwiGLU is rounded to bf16."""
        pairs = route.ids.flatten().long()
        rows = x.float().repeat_interleave(route.ids.shape[1], dim=0)
        found, alphas = torch.empty_like(rows), self.alphas[pairs][:, None]
        for i in range(DISTINCT):
            mine = (self.picks[pairs] == i).nonzero().flatten()
            ups = NvFp4Tensor(self.gate_up.packed[i], self.gate_up.block_scale[i], self.alphas[0]).unscaled()
            downs = NvFp4Tensor(self.down.packed[i], self.down.block_scale[i], self.alphas[0]).unscaled()
            gate, up = (rows[mine] @ half.T * alphas[mine] for half in ups.split(self.layer.inner))
            hidden = clamped_swiglu(gate, up, self.layer.limit).bfloat16().float()
            found[mine] = hidden @ downs.T * alphas[mine]
        return found.view(*route.ids.shape, -1).sum(1)


class Case:
    """A number of tokens: routes, and buffers that all runs share."""

    def __init__(self, weights: Weights, tokens: int, device: str = "cuda"):
        layer = weights.layer
        self.weights, self.tokens, self.tile = weights, tokens, layer.tile(tokens)
        self.gathers = operations.w4a16_gathers(self.tile)
        self.routes = [random_route(layer, tokens, self.tile, device) for _ in range(ROUTES)]

        def new(rows: int, width: int) -> Tensor:
            return torch.randn(rows, width, dtype=torch.bfloat16, device=device)

        count = layer.rows(tokens)
        self.x, self.rows, self.hidden = new(tokens, layer.width), new(count, layer.width), new(count, layer.inner)
        self.output, self.sums = new(count, layer.width), new(tokens, layer.width)
        self.routing_weights = torch.ones(tokens, layer.visits, device=device)

    @property
    def visited(self) -> float:
        """Experts with any token, the mean of the routes."""
        return sum(int((route.counts > 0).sum()) for route in self.routes) / len(self.routes)

    def gate_up(self, run: int) -> None:
        """Launch the GEMM of gates and ups, on routes and a copy of the layer of its own."""
        route, (ups, _) = self.routes[run], self.weights.tiled[run % len(self.weights.tiled)]
        groups, limit = (self.tile, route.offsets, route.counts), self.weights.layer.limit
        if self.gathers:
            operations.expert_gate_up(self.x, *groups, ups, limit, sources=route.sources, out=self.hidden)
        else:
            operations.expert_gate_up(self.rows, *groups, ups, limit, out=self.hidden)

    def down(self, run: int, counts_ahead: bool = True) -> None:
        """Launch the GEMM of the down projections, which reads counts before the kernel in front has ended or not."""
        route, (_, downs) = self.routes[run], self.weights.tiled[run % len(self.weights.tiled)]
        operations.expert_down(
            self.hidden, self.tile, route.offsets, route.counts, downs, out=self.output, counts_ahead=counts_ahead
        )

    def _both(self, run: int) -> None:
        self.gate_up(run)
        self.down(run)

    def _mixture(self, run: int) -> None:
        route = self.routes[run]
        if not self.gathers:
            scatter_rows(self.x, route.destination, self.rows)
        self._both(run)
        finalize(self.output, route.destination, self.routing_weights, self.sums)

    def _marlin(self, copies: Sequence[peer.Experts], run: int) -> Tensor:
        limit = self.weights.layer.limit
        return copies[run % len(copies)].run(self.x, self.routes[run].ids, self.routing_weights, limit)

    def ours(self) -> Tensor:
        """The mixture with the first routes, fp32 [T, K], by the GEMMs and torch."""
        places = self.routes[0].destination.long()
        self.rows[places.flatten()] = self.x.repeat_interleave(places.shape[1], dim=0)
        self._both(0)
        return self.output[places].float().sum(1)

    def check(self) -> float:
        """The error of our GEMMs against dequantised weights, relative and in the norm.

        Raises:
            AssertionError: it is more than rounding.
        """
        error = relative_error(self.ours(), self.weights.expected(self.x, self.routes[0]))
        assert error < LIMIT, f"{self.weights.layer}, {self.tokens} tokens: error {error:.3g}, expected below {LIMIT}"
        return error

    def time(self, run: Callable[[int], object]) -> float:
        """Microseconds of a run, over all routes and copies of the layer."""
        return rotating([partial(run, i) for i in range(ROUTES)])

    def time_marlin(self, copies: Sequence[peer.Experts]) -> float:
        """Marlin's whole mixture.

        Raises:
            ValueError: its result is not ours.
        """
        require_near(self._marlin(copies, 0), self.ours(), MARLIN_LIMIT)
        return self.time(partial(self._marlin, copies))


@dataclass(frozen=True)
class Row:
    """Times of a layer's experts for a number of tokens; ``weight_bytes`` of the visited ones."""

    layer: Layer
    tokens: int
    pairs: int
    visited: float
    token_tile: int
    gate_up_us: float
    down_us: float
    weight_bytes: float
    weight_rate: float
    rate: float
    mixture_us: float
    marlin_us: float | None


def measure(weights: Weights, tokens: int, marlin: peer.Marlin, copies: Sequence[peer.Experts] | None) -> Row:
    """Ours, then Marlin's unless there are no copies."""
    layer, case = weights.layer, Case(weights, tokens)
    gate_up, down, mixture = (case.time(run) for run in (case.gate_up, case.down, case._mixture))
    theirs = marlin.attempt(partial(case.time_marlin, copies)) if copies else None
    pairs, size, seconds = tokens * layer.visits, case.visited * layer.expert_bytes, (gate_up + down) / 1e6
    return Row(
        layer, tokens, pairs, case.visited, case.tile, gate_up, down, size, size / seconds,
        2 * pairs * 3 * layer.width * layer.inner / seconds, mixture, theirs,
    )  # fmt: skip


def text(row: Row, bandwidth: float) -> str:
    layer, theirs = row.layer, row.marlin_us
    marlin = f"{theirs:.1f} | {theirs / row.mixture_us:.2f}" if theirs else "- | -"
    return (
        f"| {layer.model}, {layer.ranks} | {row.tokens} | {row.pairs} | {row.visited:.1f} | {row.token_tile}"
        f" | {row.gate_up_us:.1f} | {row.down_us:.1f} | {row.weight_bytes / 1e6:.0f}"
        f" | {row.weight_rate / 1e12:.2f} | {row.weight_rate / bandwidth:.0%} | {row.rate / 1e12:.0f}"
        f" | {row.mixture_us:.1f} | {marlin} |"
    )


def run_layer(layer: Layer, tokens: Sequence[int], bandwidth: float, marlin: peer.Marlin) -> Iterator[Row]:
    """Check and measure a layer; rows are printed as they come."""
    weights = Weights(layer)
    error = Case(weights, CHECKED_TOKENS).check()
    print(f"{layer.model}, {layer.ranks}: ours at {CHECKED_TOKENS} tokens, error {error:.2g}", flush=True)
    copies = marlin.attempt(weights.for_marlin)
    print(HEADER, flush=True)
    for count in tokens:
        row = measure(weights, count, marlin, copies)
        print(text(row, bandwidth), flush=True)
        yield row
