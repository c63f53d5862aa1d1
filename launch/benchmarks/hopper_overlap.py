"""Measures how much of Hopper's decode GEMMs is hidden where launches overlap, which no B200 was there to tell.

A GEMM that is launched the ordinary way begins when the kernel in front has ended. As a programmatic dependent (PDL)
it is placed on SMs as soon as that kernel lets it in, sets up, and sends for its first weights. It waits only before it
reads what that kernel writes. The program replays each GEMM of a layer of Flash from CUDA graphs, over more copies of
its weights than L2 holds:

* alone: one launch after the other, all ordinary.
* behind a GEMM: the same launches as dependents.
* behind a small kernel: by turns with the experts' sum, a kernel of a few CTAs, ordinary and as dependents. The small
  kernel's own time in such a chain is taken off.
* in a layer: its six GEMMs in order, with the small kernel wherever a layer has other kernels.

Results of a kernel as a dependent must be those of the ordinary one, bit for bit. ``hidden`` is the ordinary time less
the overlapped one. ``share`` is that over launch, fill and epilogue: the ordinary time less that of the weights at a
copy's bandwidth. The down GEMM runs in both of its forms: one waits before it reads counts, the other reads them ahead.

The fit has three constants for each number of tokens and either kernel in front, medians over rows
(:mod:`.hopper_overlap_report`). ``--output launch/results/hopper_overlap_h200.json`` puts them where the model of SM100
looks for them: ``launch/bench_sm100 --modelled`` then credits what GEMMs do before their wait by these constants.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.hopper import DTYPES, Gemm, Operands, gemms, planned
from benchmarks.hopper_experts import ROUTES, Case, Layer, Weights, layers
from benchmarks.hopper_overlap_report import (
    DOWN,
    FIT_HEADER,
    HEADER,
    LAYER_HEADER,
    Ahead,
    LayerRow,
    Row,
    Times,
    fit,
    fit_lines,
)
from benchmarks.hopper_runs import Parts, compile_all
from benchmarks.kernels import copy_bandwidth, elapsed
from benchmarks.options import AT_ONCE, RANKS, output_file
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from nvfp4_sgl.triton_kernels.experts import finalize as sum_of_experts
from nvfp4_sgl.weights.gemms import launched_gemms
from nvfp4_sgl.weights.parallel import Ownership
from tests.support.released import FLASH, config_json

Run = Callable[[], object]
Timer = Callable[[Sequence[Run]], float]
"""Microseconds of some launches, each once."""
LAUNCHES = 200
"""Launches of a graph, about: what begins a graph then is little beside them."""
GRAPH_US = 5_000
"""Launches that take longer than this share a graph with fewer."""
WARM, REPLAYS = 3, 9
SMALL_RUNS = 64
"""Launches of the small kernel in the graph that times it."""
SMALL_WIDTH, SMALL_ROWS = 4096, 8
BEHIND_SMALL = (True, True, True, False, True, False)
"""Whether a layer has another kernel in front of each of its GEMMs: not between wo_a and wo_b, nor before down."""
GATE_UP = "experts.w1 + w3"


def graph_us(runs: Sequence[Run]) -> float:
    """Microseconds of ``runs``, from a graph that holds them one or more times."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
        eager_us = elapsed(lambda: [run() for run in runs])
    repeats = max(1, min(LAUNCHES // len(runs), int(GRAPH_US / eager_us)))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for run in runs:
                run()
    times = [elapsed(graph.replay) for _ in range(WARM + REPLAYS)]
    return statistics.median(times[WARM:]) / repeats


@contextmanager
def launched(overlapped: bool) -> Iterator[None]:
    """Launch kernels as programmatic dependents inside the block, or all of them the ordinary way."""
    runner = copy.copy(launcher.current())
    runner.programmatic_launch = overlapped
    option = sum_of_experts.OVERLAPPED if overlapped else {}
    with launcher.use(runner), mock.patch.object(sum_of_experts, "OVERLAPPED", option):
        yield


def small_kernel() -> Run:
    """The experts' sum of one token, which waits and then lets the next kernel in, as all of Triton's do."""
    rows = torch.zeros(SMALL_ROWS, SMALL_WIDTH, dtype=torch.bfloat16, device="cuda")
    destination = torch.arange(SMALL_ROWS, dtype=torch.int32, device="cuda")[None]
    weights = torch.ones(1, SMALL_ROWS, device="cuda")
    out = torch.empty(1, SMALL_WIDTH, dtype=torch.bfloat16, device="cuda")
    return partial(sum_of_experts.finalize, rows, destination, weights, out)


class Bench:
    """A timer, the small kernel, and this kernel's own times in a chain of it alone."""

    def __init__(self, timer: Timer, small: Run):
        self._timer, self.small = timer, small
        self.small_times = self.times([small] * SMALL_RUNS).over(SMALL_RUNS)

    def times(self, runs: Sequence[Run]) -> Times:
        """Times of all ``runs``, in order."""
        found = []
        for overlapped in (False, True):
            with launched(overlapped):
                found.append(self._timer(runs))
        return Times(*found)

    def behind_gemm(self, runs: Sequence[Run]) -> Times:
        """Times a launch of one GEMM's launches, one after the other."""
        return self.times(runs).over(len(runs))

    def behind_small(self, runs: Sequence[Run]) -> Times:
        """The same by turns with the small kernel, without its own times."""
        turns = [each for run in runs for each in (self.small, run)]
        return self.times(turns).over(len(runs)).less(self.small_times)


def check_same(run: Run, out: Tensor) -> None:
    """Compare a kernel's result as a dependent with that of the ordinary launch.

    Raises:
        AssertionError: they differ.
    """
    found = []
    for overlapped in (False, True):
        out.fill_(-1.0)
        with launched(overlapped):
            run()
        found.append(out.clone())
    assert torch.equal(*found), "a kernel's results differ between ordinary launches and dependents"


@dataclass(frozen=True)
class Measured:
    """A GEMM's launches on its copies of weights, and what they are."""

    name: str
    groups: int
    features: int
    k: int
    ahead: Ahead
    shape: KernelShape
    weight_bytes: float
    runs: list[Run]
    out: Tensor

    @property
    def key(self) -> tuple[Any, ...]:
        """Tells GEMMs with different kernels or sizes apart."""
        return self.name, self.groups, self.features, self.k, self.ahead

    def row(self, bench: Bench, ranks: int, tokens: int, bandwidth: float) -> Row:
        """Time it."""
        check_same(self.runs[0], self.out)
        shape = (self.shape.token_tile, self.shape.split_k, self.shape.ctas_per_sm)
        floor = self.weight_bytes / bandwidth * 1e6
        times = bench.behind_gemm(self.runs), bench.behind_small(self.runs)
        return Row(
            ranks, self.name, self.groups, self.features, self.k, tokens, self.ahead, shape, floor, *times
        )  # fmt: skip


def measured_dense(operands: Operands, tokens: int) -> Measured:
    """A dense GEMM, which sends for weights before its wait."""
    gemm = operands.gemm
    x = operands.tokens(tokens)
    out = x.new_empty(tokens, gemm.groups, gemm.features, dtype=DTYPES[gemm.output])
    runs: list[Run] = [partial(operands.run, index, x, out) for index in range(len(operands.weights))]
    shape = planned(gemm, tokens, "nvfp4", operands.device)
    return Measured(
        gemm.name, gemm.groups, gemm.features, gemm.k, "weights", shape, operands.bytes, runs, out
    )  # fmt: skip


def measured_experts(case: Case, device: str) -> list[Measured]:
    """Gates and ups, down that waits first, and down that reads counts ahead."""
    layer = case.weights.layer
    gate_up, down = layer.shapes(case.tokens, device)
    up_bytes = case.visited * layer.expert_bytes * 2 / 3
    sizes = (layer.experts, layer.inner, layer.width), (layer.experts, layer.width, layer.inner)
    ups: list[Run] = [partial(case.gate_up, run) for run in range(ROUTES)]
    found = [Measured(GATE_UP, *sizes[0], "nothing", gate_up, up_bytes, ups, case.hidden)]
    for counts_ahead in (False, True):
        ahead: Ahead = "counts and weights" if counts_ahead else "nothing"
        downs: list[Run] = [partial(case.down, run, counts_ahead) for run in range(ROUTES)]
        shape = replace(down, counts_ahead=counts_ahead)
        found.append(Measured(DOWN, *sizes[1], ahead, shape, up_bytes / 2, downs, case.output))
    return found


def chain(small: Run, gemms: Sequence[Measured]) -> list[Run]:
    """The launches of a layer's GEMMs, ``ROUTES`` times over, with the small kernel where the layer has others."""
    runs: list[Run] = []
    for index in range(ROUTES):
        for behind_small, gemm in zip(BEHIND_SMALL, gemms, strict=True):
            runs += [small] * behind_small + [gemm.runs[index % len(gemm.runs)]]
    return runs


def parts_us(bench: Bench, gemms: Sequence[Measured], rows: dict[tuple[Any, ...], Row]) -> float:
    """A layer's time as a sum of what each launch takes in a chain of its own."""
    total = 0.0
    for behind_small, gemm in zip(BEHIND_SMALL, gemms, strict=True):
        row = rows[gemm.key]
        total += bench.small_times.overlapped + row.behind_small.overlapped if behind_small else 0.0
        total += 0.0 if behind_small else row.behind_gemm.overlapped
    return total


def layer_row(
    bench: Bench, ranks: int, tokens: int, gemms: Sequence[Measured], rows: dict[tuple[Any, ...], Row]
) -> LayerRow:
    """Time a layer whose last GEMM, down, comes in both of its forms.

    Args:
        gemms: the layer's, down as the last two.
        rows: by GEMM, for the same number of tokens.
    """
    *before, waits, ahead = gemms
    waiting, reading = (bench.times(chain(bench.small, [*before, down])).over(ROUTES) for down in (waits, ahead))
    launches = len(BEHIND_SMALL) + sum(BEHIND_SMALL)
    return LayerRow(ranks, tokens, launches, waiting, reading, parts_us(bench, [*before, ahead], rows))


def layer_gemms(config: ModelConfig, ranks: int) -> list[tuple[int, int, int, str]]:
    """Groups, features, K and output of the dense GEMMs of a layer with an indexer, in order."""
    index = config.layer_kinds.index(LayerKind.CSA)
    found = launched_gemms(config, Ownership(size=ranks), stage=range(index, index + 1))
    return [(one.groups, one.features, one.k, one.output) for one in found if not one.experts_per_token]


class Report:
    """Rows as they come: printed, and kept for the JSON and the fit."""

    def __init__(self, about: dict[str, Any], output: Path | None):
        self.about, self.output = about, output
        self.rows: list[Row] = []
        self.layers: list[LayerRow] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row.text(), flush=True)

    def write(self) -> None:
        """Whatever comes to an end early leaves what it has found."""
        if self.output is None:
            return
        found = {
            "rows": [asdict(row) | {"share": shares(row)} for row in self.rows],
            "layers": [asdict(row) for row in self.layers],
            "fit": fit(self.rows, self.layers),
        }
        self.output.write_text(json.dumps(self.about | found, indent=1) + "\n")


def shares(row: Row) -> dict[str, float]:
    return {"behind_gemm": row.share(row.behind_gemm), "behind_small": row.share(row.behind_small)}


class Ranks:
    """The weights of one of so many ranks: of dense GEMMs, and of the experts of a layer.

    Args:
        gemms: dense ones. layer: experts.
        in_layer: groups, features, K and output of the dense GEMMs of the layer to chain.
    """

    def __init__(
        self,
        ranks: int,
        gemms: Sequence[Gemm],
        layer: Layer,
        in_layer: Sequence[tuple[int, int, int, str]],
        device: str = "cuda",
    ):
        self.ranks, self.device, self._in_layer = ranks, device, in_layer
        self.dense = [Operands(gemm, device=device) for gemm in gemms]
        self.experts = Weights(layer, device)

    def measure(self, bench: Bench, tokens: int, bandwidth: float, known: dict[Any, Row], report: Report) -> None:
        """Time its GEMMs but those of sizes that are ``known``, then its layer."""
        case = Case(self.experts, tokens, self.device)
        dense = {size_of(operands.gemm): measured_dense(operands, tokens) for operands in self.dense}
        experts = measured_experts(case, self.device)
        rows = {}
        for one in [*dense.values(), *experts]:
            if (one.key, tokens) not in known:
                known[one.key, tokens] = one.row(bench, self.ranks, tokens, bandwidth)
                report.add(known[one.key, tokens])
            rows[one.key] = known[one.key, tokens]
        layer = [*(dense[size] for size in self._in_layer), *experts]
        report.layers.append(layer_row(bench, self.ranks, tokens, layer, rows))
        report.write()


def size_of(gemm: Gemm) -> tuple[int, int, int, str]:
    return gemm.groups, gemm.features, gemm.k, gemm.output


def shapes_of(ranks: Sequence[int], tokens: Sequence[int]) -> tuple[list[KernelShape], float]:
    """All kernels that are timed, and the SwiGLU clamp."""
    shapes: list[KernelShape] = []
    for count in tokens:
        shapes += [planned(gemm, count, "nvfp4") for gemm in gemms(["flash"], ranks)]
        for layer in layers(["flash"], ranks):
            gate_up, down = layer.shapes(count)
            shapes += [gate_up, down, replace(down, counts_ahead=False)]
    return shapes, next(layers(["flash"], ranks)).limit


def measure_all(args: argparse.Namespace, report: Report, bandwidth: float) -> list[str]:
    """Time everything; names of what failed."""
    parts = Parts()
    known: dict[Any, Row] = {}
    config = ModelConfig.from_dict(config_json(FLASH))
    bench = Bench(graph_us, small_kernel())
    small = bench.small_times
    report.about["small_us"] = asdict(small)
    print(f"small kernel: {small.ordinary:.2f} us, overlapped {small.overlapped:.2f} us\n\n{HEADER}", flush=True)
    for ranks in args.tp:
        (layer,) = layers(["flash"], [ranks])
        with parts.part(f"TP {ranks}"):
            weights = Ranks(ranks, list(gemms(["flash"], [ranks])), layer, layer_gemms(config, ranks))
            for tokens in args.tokens:
                with parts.part(f"TP {ranks}, {tokens} tokens"):
                    weights.measure(bench, tokens, bandwidth, known, report)
            del weights
    return parts.failed


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch/bench_hopper_overlap", description=(__doc__ or "").splitlines()[0]
    )  # fmt: skip
    parser.add_argument(
        "--tp",
        nargs="+",
        type=int,
        choices=RANKS,
        default=RANKS,
        metavar="N",
        help="tensor-parallel sizes",
    )
    parser.add_argument("--tokens", nargs="+", type=AT_ONCE, default=[1, 16, 64], help="tokens of a step")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write the times here, as JSON")
    return parser


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device here; these kernels run on Hopper GPUs")
    started = time.monotonic()
    torch.manual_seed(0)
    compile_all(*shapes_of(args.tp, args.tokens), programmatic_launch=(True, False))
    print(f"our kernels were ready after {time.monotonic() - started:.0f} s", flush=True)
    bandwidth, chip = copy_bandwidth(), torch.cuda.get_device_name()
    date = datetime.date.today().isoformat()
    report = Report({"chip": chip, "torch": torch.__version__, "date": date, "bandwidth": bandwidth}, args.output)
    print(f"{chip}, torch {torch.__version__}, {date}: copy {bandwidth / 1e12:.2f} TB/s")
    failed = measure_all(args, report, bandwidth)
    print(f"\n{LAYER_HEADER}", *(row.text() for row in report.layers), sep="\n")
    print(f"\n{FIT_HEADER}", *fit_lines(fit(report.rows, report.layers)), sep="\n")
    report.write()
    print(f"\n{time.monotonic() - started:.0f} s in all")
    for name in failed:
        print(f"failed: {name}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
