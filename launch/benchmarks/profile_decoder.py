"""Launches of the GPU decoder by layer kind, on a tiny checkpoint with the real head size and number of entries chosen.

One layer of each kind runs by itself: attention, its experts, and the two mHC sites behind them. Decode runs from CUDA
graphs, as it is served. Products of a tiny model say nothing about real ones; the order and the number of launches, and
what our kernels cost beside an empty one, do.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import pkgutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from triton.runtime.jit import KernelInterface

from benchmarks.flash import write_flash
from benchmarks.options import AT_ONCE, LAYERS, RANKS, output_file
from benchmarks.profile_report import Section, device_events, median_launches
from nvfp4_sgl import triton_kernels
from nvfp4_sgl.arguments import whole_number
from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.captured import CapturedDecode, capture
from nvfp4_sgl.model.contract import Activation
from nvfp4_sgl.model.layer import Block, Walk
from nvfp4_sgl.standalone import Pass, Standalone
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyFormat
from nvfp4_sgl.weights.parallel import lone_rank

SHAPES: dict[str, Any] = {"index_topk": 512, "num_attention_heads": 64, "o_groups": 8, "num_hidden_layers": 6}
DECODING, PROMPT = (1, 64), 2048
CONTEXT = 2500
"""Tokens before a decode pass: more ratio-4 entries than are chosen."""
FLASH_DECODING, FLASH_PROMPT, FLASH_CONTEXT = (1, 16, 64), 1024, 2048
TOKENS = whole_number(1 << 20)
"""Tokens of a prompt, and of those that a graph is laid out for."""
REPEATS = 5
REPLAYS, PREFILLS = 40, 5


def launches(run: Callable[[], object], attempts: int = 3) -> list[tuple[str, float]]:
    """Name and median microseconds of each kernel, copy and fill that ``run`` launches.

    The profiler now and then loses a record, which shows as runs that differ: then once more.
    """
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    try:
        return median_launches(device_events(events), REPEATS)
    except ValueError:
        if attempts == 1:
            raise
    return launches(run, attempts - 1)


def each_us(run: Callable[[], object], repeats: int = REPLAYS) -> float:
    """Median microseconds of a run, from one to the next of several in a row."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    run()
    for mark in marks:
        mark.record()
        run()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) * 1000 for begin, end in pairwise(marks))


def our_kernels() -> set[str]:
    """Names of all functions in ``triton_kernels`` that Triton compiles."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(triton_kernels.__path__, f"{triton_kernels.__name__}.")
    ]
    return {
        value.__name__ for module in modules for value in vars(module).values() if isinstance(value, KernelInterface)
    }


def parts(model: Standalone, work: Pass) -> Iterator[tuple[str, Callable[[], object]]]:
    """A pass in parts: what lies around the layers, and the last layer of each kind, on its own random input."""
    decoder, config, step = model.decoder, model.config, work.step
    blocks = cast(list[Block], list(decoder.layers))
    streams = decoder.embed(work.ids, model.table)
    _, mix = blocks[0].hc_attn.enter(streams, step)

    def around() -> None:
        model.planner.fill(step, work.request)
        x, _ = blocks[0].hc_attn.enter(decoder.embed(work.ids, model.table), step)
        model.logits(x.require_values())

    yield "around the layers", around
    for layer in {kind: layer for layer, kind in enumerate(config.layer_kinds)}.values():
        block, cache = blocks[layer], model.caches.layers[layer]
        x, _ = block.hc_attn.enter(streams, step)

        def run(block: Block = block, cache: LayerCache = cache, x: Activation = x, mix: Any = mix) -> None:
            sublayers = block.sublayers(work.ids, step, cache)
            Walk(sublayers, block.hc_attn, streams, step, entered=(x, mix)).finish()

        yield f"{config.kind(layer).name} (layer {layer})", run


class Prompts(NamedTuple):
    """Prompts of one pass, each of so many tokens; in words ``8x1024``, or ``1024`` for one."""

    requests: int
    tokens: int

    @classmethod
    def parse(cls, words: str) -> Prompts:
        requests, several, tokens = words.rpartition("x")
        return cls(AT_ONCE(requests) if several else 1, TOKENS(tokens))

    def __str__(self) -> str:
        return f"{self.requests}x{self.tokens}" if self.requests > 1 else str(self.tokens)


def prompt(count: int) -> list[int]:
    return torch.randint(25, 500, (count,)).tolist()


def next_tokens(requests: int) -> dict[int, list[int]]:
    """A token of its own for each request: layers that route by token id send equal ones to the same experts."""
    return {request: [25 + request] for request in range(requests)}


@torch.no_grad()
def sections(model: Standalone) -> Iterator[Section]:
    ours = our_kernels()

    def section(title: str, part: str, run: Callable[[], object], us: float | None = None) -> Section:
        return Section.of(title, part, launches(run), ours, us)

    for requests in DECODING:
        title = f"decode of {requests}"
        model.reset()
        for request in range(requests):
            model.extend({request: prompt(CONTEXT)})
        captured = CapturedDecode(model, requests)
        captured(next_tokens(requests))
        yield section(title, "the whole pass", captured.graph.replay, each_us(captured.graph.replay))
        for part, run in parts(model, model.begin(next_tokens(requests))):
            graph = capture(run)
            yield section(title, part, graph.replay, each_us(graph.replay))
    model.reset()
    work = model.begin({0: prompt(PROMPT)})
    title = f"prefill of {PROMPT}"
    yield section(title, "the whole pass", lambda: model.forward(work))
    for part, run in parts(model, work):
        yield section(title, part, run)


@torch.no_grad()
def flash_sections(model: Standalone, decoding: Sequence[int], prompts: Sequence[Prompts] = ()) -> Iterator[Section]:
    """Decode steps and prompts as a whole: weights are too many for L2 to hold them from one pass to the next.

    Prompts run as they are served, without a graph, so their time is the host's where the GPU waits for it.
    """
    ours = our_kernels()
    for given in prompts:
        model.reset()
        work = model.begin({request: prompt(given.tokens) for request in range(given.requests)})
        forward = partial(model.forward, work)
        title = f"prefill of {given}"
        yield Section.of(title, "the whole pass", launches(forward), ours, each_us(forward, PREFILLS))
    for requests in decoding:
        model.reset()
        for request in range(requests):
            model.extend({request: prompt(FLASH_PROMPT)})
        captured = CapturedDecode(model, requests)
        captured(next_tokens(requests))
        replay = captured.graph.replay
        yield Section.of(f"decode of {requests}", "the whole pass", launches(replay), ours, each_us(replay))


def tiny_model() -> Standalone:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(folder, "nvfp4-full", seed=3, **SHAPES)
        return Standalone(folder, target="sm_90a", device="cuda", requests=max(DECODING), capacity=4096)


def flash_model(
    layers: int,
    ranks: int,
    requests: int = max(FLASH_DECODING),
    capacity: int = FLASH_CONTEXT,
    context: int = FLASH_CONTEXT,
) -> Standalone:
    """The first layers of Flash with random weights, as one of ``ranks`` ranks has them, which exchanges nothing.

    Args:
        requests: the most of a step.
        capacity: tokens of each that pools hold.
        context: tokens of each that graphs are laid out for, at least ``capacity``: layouts are compared over one pool.
    """
    with tempfile.TemporaryDirectory() as folder:
        verified = verify_dummy(write_flash(Path(folder), TinyFormat.NVFP4_FULL, layers))
        model = Standalone(
            verified,
            target="sm_90a",
            device="cuda",
            requests=requests,
            capacity=capacity,
            parallel=lone_rank(ranks),
            uniform_experts=True,
        )
    model.planner.slots = replace(model.planner.slots, longest=max(capacity, context))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(prog="launch/profile_decoder")
    parser.add_argument("--output", type=output_file, metavar="FILE", help="also write the report here, as JSON")
    parser.add_argument("--flash", type=LAYERS, metavar="LAYERS", help="the first layers of Flash, random weights")
    ranks = parser.add_argument(
        "--tp", type=int, choices=RANKS, default=2, metavar="N", help="with --flash: time one rank of N (default: 2)"
    )
    context = parser.add_argument(
        "--context",
        type=TOKENS,
        default=FLASH_CONTEXT,
        help="with --flash: tokens that graphs are laid out for; what a long layout costs short requests",
    )
    prompts = parser.add_argument(
        "--prompts",
        nargs="+",
        type=Prompts.parse,
        default=[],
        help="with --flash: also prompts of this many tokens; 8x1024: eight in a pass",
    )
    requests = parser.add_argument(
        "--requests", nargs="+", type=AT_ONCE, default=FLASH_DECODING, help="with --flash: requests of a step"
    )
    arguments = parser.parse_args()
    for option in (ranks, context, prompts, requests):
        if not arguments.flash and (found := getattr(arguments, option.dest)) != option.default:
            parser.error(f"{option.option_strings[0]} {found}: expected --flash, too; add it, or leave this out")
    if not torch.cuda.is_available():
        raise SystemExit("profile_decoder: no CUDA device")
    torch.manual_seed(0)
    if arguments.flash:
        capacity = max([FLASH_CONTEXT, *(given.tokens for given in arguments.prompts)])
        most = max([*arguments.requests, *(given.requests for given in arguments.prompts)])
        model = flash_model(arguments.flash, arguments.tp, most, capacity, arguments.context)
    else:
        model = tiny_model()
    launches(torch.zeros(1, device="cuda").zero_)  # the profiler misses some of what comes first
    chip, date = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    what = f"tiny, {SHAPES}"
    if arguments.flash:
        context = model.planner.slots.longest
        what = f"Flash, {arguments.flash} layers, a rank of {arguments.tp}, laid out for {context} tokens"
    print(f"{chip}, torch {torch.__version__}, {date}: {what}")
    found = []
    for section in flash_sections(model, arguments.requests, arguments.prompts) if arguments.flash else sections(model):
        found.append(section)
        print("\n" + section.text(), flush=True)
    if arguments.output:
        report = {"chip": chip, "torch": torch.__version__, "date": date, "sections": [asdict(one) for one in found]}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
