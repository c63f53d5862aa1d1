"""Drafts on GPU targets against the CPU reference of the same mode: prefill, passes that verify, DSpark's blocks.

The yardstick is the reference itself: what rounding costs it, against fp32 activations that are never quantised, is
what it may cost the GPU, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.reader import reader_for
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.model.contract import Context, PassKind, PassRequest, Slots
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.targets.fused.attention import packed
from tests.support import native
from tests.support.interpreted import ON_GPU
from tests.support.lockstep import relative_errors

BOUND = 1.5
"""Bound of the median error, as a multiple of the reference's own."""
PROMPTS, EACH = ((9, 135, 3), 4) if ON_GPU else ((5, 2), 3)
"""Tokens of each request's prompt, and of each in the pass behind it."""


class Drafting:
    """A draft of a checkpoint, with caches of its own; passes over them."""

    def __init__(self, verified: Verified, target: str, mode: ActivationMode, dtype: torch.dtype, blocks: int):
        self.device = torch.device("cuda" if ON_GPU and target != "cpu" else "cpu")
        choice, reader = choose(target, mode), reader_for(verified.inventory, self.device, of_draft=True)
        self.config = verified.config
        self.context = Context(reader, self.config, choice.boundaries, self.device, dtype, choice.mode)
        config = replace(self.config, num_hidden_layers=blocks, layer_kinds=(LayerKind.SWA,) * blocks)
        self.caches = self.caches_of(config)
        table, swa = self.caches.slots.int().to(self.device), self.caches.full_to_swa.to(self.device)
        self.slots = Slots(table, swa, len(PROMPTS), 256)
        self.planner: Any = choice.boundaries.plan(replace(self.context, config=config), self.slots, self.caches.layers)

    def caches_of(self, config: ModelConfig) -> LocalCaches:
        """Caches of the layers of ``config``, in slots that do not depend on them."""
        dtype, device = self.context.dtype, self.device
        return LocalCaches(config, requests=len(PROMPTS), capacity=256, packed=True, dtype=dtype, device=device)

    def step(self, starts: Sequence[int], ends: Sequence[int], kind: PassKind = PassKind.EXTEND) -> Any:
        positions = torch.cat([torch.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        added = torch.tensor([end - start for start, end in zip(starts, ends, strict=True)], dtype=torch.int32)
        each = {"added": added.to(self.device)} if kind is PassKind.EXTEND else {"tokens_each": int(added[0])}
        requests, lengths = torch.arange(len(starts)).to(self.device), torch.tensor(ends).to(self.device)
        request = PassRequest(positions.to(self.device), requests, lengths, kind, longest=max(ends), **each)
        return self.planner.plan(request)

    def streams(self, tokens: int, seed: int) -> Tensor:
        shape = tokens, self.config.hc_mult, self.config.hidden_size
        return self.given(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))

    def given(self, values: Tensor) -> Tensor:
        """bf16 values in the dtype of the model."""
        return values.bfloat16().to(self.device, self.context.dtype)


@torch.no_grad()
def mtp(verified: Verified, target: str, mode: ActivationMode, dtype: torch.dtype) -> list[Tensor]:
    """Hidden states and streams, as rows, of a prompt of each request and of a pass of several tokens of each."""
    rig = Drafting(verified, target, mode, dtype, blocks=1)
    draft, found = MtpDraft(rig.context), []
    middle = [length + EACH for length in PROMPTS]
    for starts, ends, kind in (([0] * len(PROMPTS), PROMPTS, PassKind.EXTEND), (PROMPTS, middle, PassKind.VERIFY)):
        step = rig.step(starts, ends, kind)
        tokens = sum(ends) - sum(starts)
        ids = torch.arange(tokens).to(rig.device)
        embedded = rig.streams(tokens, seed=1)[:, 0].contiguous()
        for result in draft(embedded, rig.streams(tokens, seed=tokens), ids, step, rig.caches.layers[0]):
            found.append(result.float().cpu().reshape(-1, rig.config.hidden_size))
    return found


@torch.no_grad()
def dspark(verified: Verified, target: str, mode: ActivationMode, dtype: torch.dtype, rounds: int = 2) -> list[Tensor]:
    """Hidden states of rounds of blocks: behind the prompts, and behind what was accepted of the first."""
    fields = DsparkConfig.parse(verified.raw, verified.config)
    rig = Drafting(verified, target, mode, dtype, blocks=fields.stages)
    draft, found, block = DsparkDraft(rig.context, fields), [], fields.block
    starts, lengths = [0] * len(PROMPTS), list(PROMPTS)
    for kind in (PassKind.EXTEND, PassKind.VERIFY)[:rounds]:
        step, tokens = rig.step(starts, lengths, kind), sum(lengths) - sum(starts)
        captured = [rig.streams(tokens, seed=10 * tokens + layer) for layer in fields.captured_layers]
        draft.inject(draft.means(captured), step, rig.caches.layers)
        ids = torch.full((block * len(lengths),), fields.noise_token).to(rig.device)
        step = rig.step(lengths, [length + block for length in lengths], PassKind.BLOCK)
        found.append(draft(rig.streams(len(ids), seed=5), ids, step, rig.caches.layers).float().cpu())
        starts, lengths = lengths, [length + EACH for length in lengths]
    return found


@torch.no_grad()
def written(verified: Verified, run: native.Run, whole: ModelConfig) -> list[Tensor]:
    """Windows of the stages behind a prompt and a pass that verifies, by plans for layers as ``whole`` has."""
    fields = DsparkConfig.parse(verified.raw, verified.config)
    rig = Drafting(verified, run.target, run.mode, torch.bfloat16, blocks=fields.stages)
    draft, layers = DsparkDraft(rig.context, fields), rig.caches_of(whole).layers
    rig.planner = rig.context.boundaries.plan(replace(rig.context, config=whole), rig.slots, layers)
    for starts, ends, kind in (
        ([0] * len(PROMPTS), PROMPTS, PassKind.EXTEND),
        (PROMPTS, [length + EACH for length in PROMPTS], PassKind.VERIFY),
    ):
        tokens = sum(ends) - sum(starts)
        captured = [rig.streams(tokens, seed=10 * tokens + layer) for layer in fields.captured_layers]
        draft.inject(draft.means(captured), rig.step(starts, ends, kind), rig.caches.layers)
    return [packed(cache.swa).pages.cpu() for cache in rig.caches.layers]


@pytest.fixture(scope="module", params=native.runs(), ids=str)
def run(request: pytest.FixtureRequest) -> Iterator[native.Run]:
    with native.gemms(request.param.target):
        yield request.param


def tiny(folder: Path, format: str, draft: str) -> Verified:
    """The draft's matrices are FP8 and MXFP4, as in releases; experts that every token visits leave no choice."""
    write_tiny(folder, format, seed=3, num_hidden_layers=3, n_routed_experts=6, draft=draft)
    return verify(folder)


def require_as_good_as_the_reference(
    found: Sequence[Tensor], rounded: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    for ours, theirs, expected in zip(found, rounded, exact, strict=True):
        error, yardstick = (float(relative_errors(each, expected).median()) for each in (ours, theirs))
        assert error <= BOUND * yardstick, (error, yardstick)


@pytest.mark.parametrize(("kind", "drafted"), [("mtp", mtp), ("dspark", dspark)], ids=["mtp", "dspark"])
def test_drafts(kind: str, drafted: Callable[..., list[Tensor]], run: native.Run, tmp_path: Path) -> None:
    verified = tiny(tmp_path, "nvfp4-experts", kind)
    exact = drafted(verified, "cpu", ActivationMode.W4A16, torch.float32)
    rounded = drafted(verified, "cpu", run.mode, torch.bfloat16)
    require_as_good_as_the_reference(drafted(verified, run.target, run.mode, torch.bfloat16), rounded, exact)


def test_context_by_the_plans_of_the_target(run: native.Run, tmp_path: Path) -> None:
    """The target's passes write what passes of the draft's own would, bit for bit."""
    verified = tiny(tmp_path, "nvfp4-experts", "dspark")
    config = verified.config
    assert {LayerKind.CSA, LayerKind.HCA} <= {*config.layer_kinds}
    own = replace(config, num_hidden_layers=3, layer_kinds=(LayerKind.SWA,) * 3)
    for ours, theirs in zip(written(verified, run, config), written(verified, run, own), strict=True):
        assert ours.any() and torch.equal(ours, theirs)


@torch.no_grad()
def rounds(verified: Verified, run: native.Run, *, in_graphs: bool) -> tuple[list[Tensor], list[Tensor]]:
    """(guesses of rounds as a server runs them, the stages' windows behind them); the first round is always eager."""
    fields = DsparkConfig.parse(verified.raw, verified.config)
    rig = Drafting(verified, run.target, run.mode, torch.bfloat16, blocks=fields.stages)
    draft, caches, requests = DsparkDraft(rig.context, fields), rig.caches.layers, len(PROMPTS)
    width, layers = rig.config.hidden_size, len(fields.captured_layers)

    def means(tokens: int, seed: int) -> Tensor:
        return rig.given(torch.randn(tokens, layers * width, generator=torch.Generator().manual_seed(seed)))

    draft.inject(means(sum(PROMPTS), 0), rig.step([0] * requests, PROMPTS), caches)
    head = rig.given(torch.randn(rig.config.vocab_size, width, generator=torch.Generator().manual_seed(1)))
    lengths, owners = torch.tensor(PROMPTS).to(rig.device), torch.arange(requests).to(rig.device)

    def several(each: int, kind: PassKind) -> PassRequest:
        """A pass over so many tokens of each request; :func:`place` says where."""
        positions = torch.empty(requests * each, dtype=torch.int64, device=rig.device)
        return PassRequest(positions, owners, torch.empty_like(lengths), kind, tokens_each=each)

    def place(request: PassRequest) -> None:
        rows = torch.arange(request.tokens_each, device=rig.device)
        request.positions.copy_((lengths[:, None] + rows).flatten())
        torch.add(lengths, request.tokens_each, out=request.ends)

    block, verify = several(fields.block, PassKind.BLOCK), several(EACH, PassKind.VERIFY)
    ids = torch.full((requests * fields.block,), fields.noise_token).to(rig.device)
    captured, streams = means(requests * EACH, 2), rig.streams(len(ids), seed=5)

    def guess(step: Any) -> Tensor:
        logits = draft.guesses.logits(draft(streams.clone(), ids, step, caches), head)
        return draft.guesses.choose(logits.view(requests, fields.block, -1), ids[:: fields.block])

    def write(step: Any) -> Tensor:
        draft.inject(captured, step, caches)
        return captured

    works, guesses = ((block, guess), (verify, write)), []
    passes = [(request, eagerly(rig, request, work)) for request, work in works]
    for number in range(4):
        if in_graphs and number == 1:
            rig.planner.reserve(max(len(request.positions) for request, _ in passes))
            passes = [(request, in_graph(rig, request, work)) for request, work in works]
        captured.copy_(means(len(captured), seed=10 + number))
        streams.copy_(rig.streams(len(ids), seed=20 + number))
        for request, run_pass in passes:
            place(request)
            result = run_pass().clone()
            if request is block:
                guesses.append(result.cpu())
        lengths += 1 + number % EACH
    return guesses, [packed(cache.swa).pages.cpu() for cache in caches]


def eagerly(rig: Drafting, request: PassRequest, work: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    """``work`` by a plan of its own each time."""
    return lambda: work(rig.planner.plan(request))


def in_graph(rig: Drafting, request: PassRequest, work: Callable[[Any], Tensor]) -> Callable[[], Tensor]:
    """A replay of ``work``, captured with its plan."""
    step, graph = rig.planner.capture(request), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.planner.fill(step, request)
        result = work(step)

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@pytest.mark.gpu
def test_rounds_in_graphs(run: native.Run, tmp_path: Path) -> None:
    """Replays with other lengths guess and write what eager passes do, bit for bit."""
    verified = tiny(tmp_path, "nvfp4-experts", "dspark")
    eager, replayed = (rounds(verified, run, in_graphs=in_graphs) for in_graphs in (False, True))
    for ours, theirs in zip((*eager[0], *eager[1]), (*replayed[0], *replayed[1]), strict=True):
        assert torch.equal(ours, theirs)
