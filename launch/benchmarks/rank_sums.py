"""Decode steps of Flash's first layers as tensor-parallel ranks, a GPU each: what sums over the ranks add.

Graphs of one step are replayed back to back, by turns: with SGLang's all-reduce, with pushed parts, and without sums
(whose results mean nothing). Ranks begin each turn together. Both kinds of sums must give the same logits: of two ranks
the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from programs.local_server import free_port
from torch import Tensor

from benchmarks.flash import write_flash
from benchmarks.options import AT_ONCE, LAYERS, output_file
from benchmarks.profile_decoder import FLASH_CONTEXT, FLASH_PROMPT, each_us, next_tokens, prompt
from nvfp4_sgl.captured import CapturedDecode
from nvfp4_sgl.limits import PUSHING_RANKS
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import TinyFormat
from nvfp4_sgl.targets.fused.exchange import exchange_of, shared_inboxes
from nvfp4_sgl.weights.parallel import Collective, Exchange, TensorParallel

TURNS, STEPS = 6, 40
"""Measurements of each kind of sums, one after the other, and steps of a measurement."""
KINDS = ("all-reduce", "pushed", "none")
LIMIT = 1 / 8
"""Relative error of logits by which sums of another order may differ; chosen, not measured."""
SUMS_OF_A_LAYER = 2
"""A sum for attention, and one for the experts."""


@dataclass
class Sums:
    """The sums of one rank's passes; ``kind`` says how those of the next pass are formed.

    Attributes:
        all_reduce: SGLang's communicator. exchange: for parts that are pushed.
    """

    all_reduce: Any
    exchange: Exchange
    kind: str = "none"

    def __call__(self, collective: Collective, part: Tensor) -> Tensor:
        if self.kind == "none":
            return part
        total = self.all_reduce.custom_all_reduce(part)
        assert total is not None, f"SGLang's all-reduce takes no {tuple(part.shape)}"
        return total

    def use(self, kind: str, model: Standalone) -> AbstractContextManager[object]:
        """Form sums so from now on; what is captured in the context may be replayed after it."""
        self.kind = kind
        context = model.decoder.context
        exchange = self.exchange if kind == "pushed" else None
        shared = replace(context, parallel=replace(context.parallel, exchange=exchange))
        model.decoder.context = model.planner.context = shared
        return self.all_reduce.capture() if kind == "all-reduce" else nullcontext()


def communicator(group: dist.ProcessGroup, device: torch.device) -> Any:
    """SGLang's all-reduce through the memory of other GPUs."""
    from sglang.srt.distributed.device_communicators.custom_all_reduce import dispatch_custom_allreduce

    # Its own check of GPUs asks for groups that a server forms; the driver's word is enough.
    os.environ.setdefault("SGLANG_SKIP_P2P_CHECK", "1")
    found = dispatch_custom_allreduce(group=group, device=device)(group=group, device=device)
    assert not found.disabled, "SGLang's all-reduce needs GPUs that reach each other's memory"
    return found


def room(tokens: Sequence[int]) -> int:
    """Tokens of inboxes for steps of so many: a power of two, since kernels' variants change there."""
    return 1 << (max(tokens) - 1).bit_length()


def step_time(replay: Callable[[], object]) -> float:
    """The median of a turn's steps, µs; ranks begin together."""
    torch.cuda.synchronize()
    dist.barrier()
    return each_us(replay, STEPS)


def fill(model: Standalone, requests: int) -> None:
    """Give each of ``requests`` requests a prompt, the same at every call and on every rank; its sums are left out."""
    torch.manual_seed(requests)
    model.reset()
    for request in range(requests):
        model.extend({request: prompt(FLASH_PROMPT)})


@torch.no_grad()
def measure(model: Standalone, sums: Sums, requests: int) -> tuple[dict[str, list[float]], float]:
    """(µs of a step of ``requests`` requests by the kind of sums, a value a turn; the logits' error by pushed parts).

    Raises:
        AssertionError: as :func:`compare`.
    """
    graphs, logits = {}, {}
    for kind in KINDS:
        with sums.use(kind, model):
            graphs[kind] = CapturedDecode(model, requests)
        dist.barrier()
    for kind, graph in graphs.items():
        sums.use("none", model)
        fill(model, requests)
        dist.barrier()
        logits[kind] = torch.cat([*graph(next_tokens(requests)).values()])
    error = compare(logits["all-reduce"], logits["pushed"], dist.get_world_size())
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(TURNS):
        for kind, graph in graphs.items():
            times[kind].append(step_time(graph.graph.replay))
    return times, error


def compare(reduced: Tensor, pushed: Tensor, ranks: int) -> float:
    """Return the relative error of logits of pushed parts against an all-reduce's, whose bits those of two ranks have.

    Raises:
        AssertionError: logits of two ranks differ, or the relative error of those of more is above :data:`LIMIT`.
    """
    if ranks == 2:
        different = int((reduced != pushed).sum())
        assert not different, f"{len(pushed)} requests: {different} logits differ between all-reduce and pushed parts"
    error = float(torch.linalg.vector_norm(pushed - reduced) / torch.linalg.vector_norm(reduced))
    assert error <= LIMIT, f"{len(pushed)} requests: logits of pushed parts have a relative error of {error:.3f}"
    return error


def work(rank: int, given: argparse.Namespace, port: int) -> None:
    """One rank; the first one prints and writes what it found."""
    device, ranks = torch.device("cuda", rank), given.tp
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    all_reduce = communicator(group, device)  # first: SGLang chooses where compiled kernels are kept
    with tempfile.TemporaryDirectory() as folder:
        verified = verify_dummy(write_flash(Path(folder), TinyFormat.NVFP4_FULL, given.layers))
        width = verified.config.hidden_size
        inboxes = shared_inboxes(group, room(given.tokens), width, device)
        sums = Sums(all_reduce, exchange_of(rank, inboxes))
        model = Standalone(
            verified,
            target="sm_90a",
            device=str(device),
            requests=max(given.tokens),
            capacity=FLASH_CONTEXT,
            parallel=TensorParallel(rank, ranks, sums),
            uniform_experts=True,
        )
    for kind in ("pushed", "all-reduce"):  # without sums a step launches what it does with an all-reduce
        sums.use(kind, model)
        model.planner.compile_missing(model.decoder, model.table, FLASH_PROMPT)
    found, errors = {}, {}
    for requests in given.tokens:
        found[requests], errors[requests] = measure(model, sums, requests)
        if rank == 0:
            print(line(requests, found[requests], errors[requests], SUMS_OF_A_LAYER * given.layers), flush=True)
    if rank == 0 and given.output is not None:
        report = {"ranks": ranks, "layers": given.layers, "us": found, "relative_error_of_logits": errors}
        given.output.write_text(json.dumps(report, indent=1))
    dist.barrier()
    dist.destroy_process_group()


def line(requests: int, times: Mapping[str, Sequence[float]], error: float, sums: int) -> str:
    """The result in words: µs of a step, µs that each of its ``sums`` sums adds, and the logits' relative error."""
    step = {kind: statistics.median(values) for kind, values in times.items()}
    words = [f"{requests:3d} requests:"]
    for kind in KINDS[:-1]:
        spread = max(times[kind]) - min(times[kind])
        added = (step[kind] - step["none"]) / sums
        words.append(f"{kind} {step[kind]:.1f} us (measurements differ by {spread:.1f}), {added:.2f} us a sum;")
    return " ".join([*words, f"no sums {step['none']:.1f} us; logits differ by {error:.2g}"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="launch/bench_rank_sums", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, choices=PUSHING_RANKS, default=2, metavar="N", help="ranks, a GPU each")
    parser.add_argument("--layers", type=LAYERS, default=8, help="the first layers of Flash (default: 8)")
    parser.add_argument("--tokens", nargs="+", type=AT_ONCE, default=[1, 16, 64], help="requests of a step")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write the times here, as JSON")
    given = parser.parse_args(arguments)
    if torch.cuda.device_count() < given.tp:
        parser.error(f"--tp {given.tp}: expected as many GPUs, found {torch.cuda.device_count()}; use a larger machine")
    processes.spawn(work, (given, free_port()), given.tp)


if __name__ == "__main__":
    main()
