"""Prompts in CUDA graphs: a pass that is padded to a graph's shape gives the bits of an eager one of as many tokens.

Kernels are chosen by the number of tokens. So the eager pass has another request in the place of the padding, whose
tokens the graph does not see. Without a GPU the pass of a graph is run as it would be captured.

With a draft a pass gives more: the streams that an MTP draft reads, or the context of DSpark's stages.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING, STATE_RING
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.cache.rows import PackedRows
from nvfp4_sgl.checkpoint.reader import reader_for
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.model.contract import PassKind, PassRequest
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.static_prompt import PromptSize, shapes, unscored_length
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.prompt_graphs import PromptGraph, PromptGraphs
from nvfp4_sgl.prompt_sizes import SWITCH, TOKENS
from nvfp4_sgl.serving.model import DeepseekV4ForCausalLM
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.fused.attention import packed
from tests.support import drafted_server, native, reruns
from tests.support.bf16_logprobs import generate, prompt
from tests.support.gpu_server import FLAGS
from tests.support.gpu_server import SHAPES as SERVED
from tests.support.gpus import TWO_GPUS
from tests.support.interpreted import ON_GPU
from tests.support.server import ServerPool

pytestmark = pytest.mark.timeout(900)

RUNS = native.runs() if ON_GPU else (native.Run("sm_90a", ActivationMode.W4A16),)
"""Interpreted on one target: what is padded is the same on all."""
DRAFTS = (None, "mtp", "dspark") if ON_GPU else ("mtp", "dspark")
"""Beside an MTP draft a pass computes what it does without one."""
SMALL: dict[str, Any] = {} if ON_GPU else {"num_hidden_layers": 3, "n_routed_experts": 6, "index_topk": 1}
"""Interpreted, a token that sees two entries has to choose."""
CAPTURED, CAPACITY = ((256, 512), 2048) if ON_GPU else ((6, 8), 256)
REQUESTS, FILLER = 6, 5
"""The last request stands where padding is."""

Added = dict[int, int]
SCRIPT: tuple[Added, ...] = (
    (
        {0: 256},  # as many tokens as the graph
        {1: 100, 2: 90},  # several prompts, and padding
        {3: 250, 1: 40},
        {0: 256},  # behind a prefix; more entries than the index chooses
        {1: 130, 2: 300, 3: 7},
        {4: 200},  # behind pages of request 0
        {3: 1, 0: 2},
        {2: 511},
    )
    if ON_GPU
    else ({0: 3, 1: 2}, {0: 5})
)
SHARED_PAGES = {4: 1} if ON_GPU else {}
"""Pages of request 0 that a request begins with."""
DECODED = 3 if ON_GPU else 1


@pytest.fixture(scope="module", params=RUNS, ids=str)
def run(request: pytest.FixtureRequest) -> native.Run:
    return request.param


class Served(Standalone):
    """The passes of a server's model, with a draft or without, over caches of its own.

    Attributes:
        windows: what the stages of DSpark keep; empty without them.
    """

    def __init__(self, checkpoint: Path, run: native.Run, draft: str | None = None, capacity: int = CAPACITY):
        device, rings = "cuda" if ON_GPU else "cpu", STATE_RING if draft is None else DRAFTED_STATE_RING
        sizes: dict[str, Any] = {"requests": REQUESTS, "capacity": capacity, "device": device, "rings": rings}
        super().__init__(checkpoint, target=run.target, mode=run.mode, **sizes)
        self.windows: list[LayerCache] = []
        self.served = DeepseekV4ForCausalLM.__new__(DeepseekV4ForCausalLM)
        nn.Module.__init__(self.served)
        self.served.decoder, self.served.feeds_draft, self.served.captured = self.decoder, draft is not None, ()
        if draft == "dspark":
            verified = verify(checkpoint)
            fields = DsparkConfig.parse(verified.raw, verified.config)
            kinds = (LayerKind.SWA,) * fields.stages
            stages = replace(self.config, num_hidden_layers=len(kinds), layer_kinds=kinds)
            # In the slots of the target's caches, which do not depend on the layers.
            self.windows = LocalCaches(stages, packed=True, dtype=self.dtype, **sizes).layers
            reader = reader_for(verified.inventory, self.device, of_draft=True)
            self.served.set_dspark_layers_to_capture(fields.captured_layers)
            self.served.feed(DsparkDraft(replace(self.decoder.context, source=reader), fields), self.windows)

    def body(self, ids: Tensor, step: Any) -> tuple[Tensor, Tensor | None]:
        """The body of a pass as the server's graphs hold it."""
        return self.served.walk(self.decoder.embed(ids, self.table), ids, step, self.caches.layers)

    def forget_windows(self) -> None:
        for cache in self.windows:
            packed(cache.swa).pages.fill_(0xFF)

    def kept(self) -> list[Tensor]:
        """Copies of :attr:`windows` but for the pages of padding and of what is in its place."""
        swa = {0, *(self.caches.full_to_swa[self.caches.slots[FILLER]] // 256).tolist()}
        pages = [packed(cache.swa).pages for cache in self.windows]
        return [each[[page for page in range(len(each)) if page not in swa]].clone() for each in pages]


@pytest.fixture(scope="module", params=DRAFTS, ids=lambda draft: draft or "alone")
def draft(request: pytest.FixtureRequest) -> str | None:
    found: str | None = request.param
    return found


@pytest.fixture(scope="module")
def model(run: native.Run, draft: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, given = tmp_path_factory.mktemp("tiny"), SMALL | ({} if draft is None else {"draft": draft})
    checkpoint = native.write_checkpoint(run.target, folder, seed=11, mode=run.mode, **given)
    with native.gemms(run.target):
        yield Served(checkpoint, run, draft)


@pytest.fixture(scope="module")
def prompts(model: Served) -> PromptGraphs:
    return graphs_of(model, CAPTURED)


def graphs_of(model: Served, tokens: tuple[int, ...]) -> PromptGraphs:
    """Captured on a GPU, and over whatever the caches hold."""
    among = shapes(
        tokens,
        REQUESTS + 1,
        longest=model.caches.capacity,
        columns=model.caches.capacity,
        unscored=unscored_length(model.config),
    )
    made = PromptGraphs(model.planner, model.body, among, model.device, model.caches.padding_request)
    with contextlib.nullcontext() if ON_GPU else reruns.instead_of_graphs():
        made.capture()
    return made


def drawn(added: Mapping[int, int], seed: int) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {r: torch.randint(2, 500, (n,), generator=generator).tolist() for r, n in added.items()}


def request_of(model: Standalone, tokens: Mapping[int, list[int]]) -> PassRequest:
    """The pass that adds ``tokens``; the server's prompts of a token each are no decode pass."""
    request = model.request(tokens)
    added = torch.tensor([len(ids) for ids in tokens.values()], dtype=torch.int32, device=model.device)
    return PassRequest(
        request.positions, request.requests, request.ends, PassKind.EXTEND, added, longest=request.longest
    )


Given = list[Tensor]
"""Hidden states of a pass, and its streams if a draft reads them."""


def copied(given: tuple[Tensor, Tensor | None]) -> Given:
    return [one.clone() for one in given if one is not None]


@torch.no_grad()
def in_a_graph(model: Served, prompts: PromptGraphs, tokens: Mapping[int, list[int]]) -> tuple[Given, PromptSize]:
    """What a pass gives in the graph that it takes."""
    request = request_of(model, tokens)
    graph = prompts.find(request)
    assert graph is not None
    ids = torch.tensor([token for of_request in tokens.values() for token in of_request], device=model.device)
    graph.load(request)
    return copied(graph.replay(ids)), graph.prompt.shape


@torch.no_grad()
def eagerly(model: Served, tokens: Mapping[int, list[int]], shape: PromptSize) -> Given:
    """What the same pass gives, launch by launch, with tokens of another request in the place of padding."""
    left = shape.tokens - sum(map(len, tokens.values()))
    model.caches.lengths[FILLER] = 0
    filled = {**tokens, **(drawn({FILLER: left}, left) if left else {})}
    request = request_of(model, filled)
    ids = torch.tensor([token for of_request in filled.values() for token in of_request], device=model.device)
    return [one[: shape.tokens - left] for one in copied(model.body(ids, model.planner.plan(request)))]


def begin(model: Standalone, added: Added) -> None:
    for request in added:
        if request in SHARED_PAGES and not model.caches.lengths[request]:
            model.share_prefix(0, request, SHARED_PAGES[request])


def decoded(model: Standalone) -> list[Tensor]:
    """Logits of steps behind the prompts, which read what these have left in the caches."""
    grown = [request for request in range(FILLER) if model.caches.lengths[request]]
    return [torch.cat([*model.extend(drawn(dict.fromkeys(grown, 1), 70 + n)).values()]) for n in range(DECODED)]


def test_graphs_give_the_bits_of_eager_passes(model: Served, prompts: PromptGraphs, draft: str | None):
    """Several prompts, prefixes of any length, short sequences and long ones; what decodes behind them; what drafts
    read."""
    model.reset()
    model.forget_windows()
    passes, taken = [], []
    script = SCRIPT if ON_GPU or draft == "mtp" else SCRIPT[:1]
    for seed, added in enumerate(script):
        begin(model, added)
        given, shape = in_a_graph(model, prompts, drawn(added, seed))
        assert len(given) == 1 + (draft == "mtp")
        passes.append(given)
        taken.append(shape)
    windows, behind = model.kept(), decoded(model)
    assert len({*taken}) == (4 if ON_GPU else 1), "some graph was left out"

    model.reset()
    model.forget_windows()
    for seed, (added, given, shape) in enumerate(zip(script, passes, taken, strict=True)):
        begin(model, added)
        for ours, eager in zip(given, eagerly(model, drawn(added, seed), shape), strict=True):
            assert bool(ours.isfinite().all()) and torch.equal(ours, eager), f"pass {seed}: {added} in {shape}"
    assert len(windows) == (3 if draft == "dspark" else 0) and all((each != 0xFF).any() for each in windows)
    assert all(torch.equal(*both) for both in zip(windows, model.kept(), strict=True))
    assert all(torch.equal(*both) for both in zip(behind, decoded(model), strict=True))


def test_padding_writes_nothing_but_its_own_page(model: Served, prompts: PromptGraphs):
    """Nobody's rows and nobody's compressor states, the draft's neither; that it visits no expert is in
    ``test_decoder``."""
    model.reset()
    before = [tensor.clone() for tensor, _ in stored(model, 0)]
    in_a_graph(model, prompts, drawn({0: 2}, 3))
    found = zip(before, stored(model, 0), stored(model, model.caches.padding_request), strict=True)
    for kept, (after, own), (_, padding) in found:
        changed = (kept.view(torch.uint8) != after.view(torch.uint8)).flatten(1).any(dim=1)
        assert set(changed.nonzero().flatten().tolist()) <= own | padding


def stored(model: Served, request: int) -> list[tuple[Tensor, set[int]]]:
    """Every buffer of the caches, and its rows that are for the first page of tokens of a request slot."""
    full = int(model.caches.slots[request, 0])
    swa, rings = int(model.caches.full_to_swa[full]) // 256, model.caches.rings
    found = [(packed(cache.swa).pages, {swa}) for cache in model.windows]
    for layer, cache in zip(model.decoder.range, model.caches.layers, strict=True):
        pages = [(cache.swa, swa), (cache.compressed, full // 256), (cache.index, full // 256)]
        found += [(rows.pages, {page}) for rows, page in pages if isinstance(rows, PackedRows)]
        owner = swa if model.config.kind(layer).keeps_state_by_page else request
        for state in (cache.state, cache.index_state):
            if state is not None:
                ring = rings[model.config.layer(layer).ratio]
                found.append((state, {*range(owner * ring, (owner + 1) * ring)}))
    return found


def test_a_filled_step_is_that_of_a_fresh_plan(model: Served, prompts: PromptGraphs):
    """Whatever the pass before has left in the graph's plan."""
    for seed, added in enumerate((SCRIPT[0], SCRIPT[1], SCRIPT[0])):
        model.reset()
        request = request_of(model, drawn(added, seed))
        graph = prompts.find(request)
        assert graph is not None
        graph.load(request)
        poison(graph)
        model.planner.fill(graph.step, graph.prompt.request)
        fresh = model.planner.plan(request)
        tokens, count = len(request.positions), len(request.requests)
        ours, theirs = graph.step.plan, fresh.plan
        for name in ("window_write", "window_lengths", "entry_lengths", "window_slots"):
            assert torch.equal(getattr(ours, name)[:tokens], getattr(theirs, name)), name
        for name, length in (("owners", tokens), ("starts", count), ("bounds", count + 1), ("requests", count)):
            assert torch.equal(getattr(ours.batch, name)[:length], getattr(theirs.batch, name)), name
        assert torch.equal(ours.batch.positions[:tokens], request.positions)
        for token, entries in enumerate(theirs.entry_lengths.tolist()):
            assert torch.equal(ours.entry_slots[token, :entries], theirs.entry_slots[token, :entries])
        for number, end in enumerate(request.ends.tolist()):
            pages = -(-end // 256)
            assert torch.equal(ours.batch.pages[number, :pages], theirs.batch.pages[number, :pages])
        for table, values in fresh.cos_sin.items():
            assert torch.equal(graph.step.cos_sin[table][:tokens], values)
        assert not ours.window_write[tokens:].any() and not ours.window_slots[tokens:].clamp(min=0).any()


def poison(graph: PromptGraph) -> None:
    plan = graph.step.plan
    metadata = (plan.window_write, plan.window_lengths, plan.entry_lengths, plan.entry_slots, plan.window_slots)
    for tensor in (*metadata, plan.batch.owners, plan.batch.starts, plan.batch.bounds, plan.batch.pages):
        tensor.fill_(-1_000_000)
    for values in graph.step.cos_sin.values():
        values.fill_(float("nan"))


def test_index_scores_are_shared(prompts: PromptGraphs):
    """Graphs run one at a time, so those for sequences as long have one room for scores."""
    by_length: dict[int, set[int]] = {}
    for graph in prompts._graphs.values():
        by_length.setdefault(graph.prompt.shape.longest, set()).add(graph.step.scores.data_ptr())
    assert all(len(rooms) == 1 for rooms in by_length.values())


@pytest.mark.gpu
def test_time_of_a_prompt(run: native.Run, tmp_path_factory: pytest.TempPathFactory):
    """Printed (``-s``): of a deeper model, whose eager pass waits for Python."""
    path = native.write_checkpoint(
        run.target, tmp_path_factory.mktemp("deep"), seed=2, mode=run.mode, **{**SERVED, "num_hidden_layers": 24}
    )
    model = Served(path, run, capacity=4096)
    free = torch.cuda.mem_get_info()[0]
    begun = time.perf_counter()
    prompts = graphs_of(model, TOKENS)
    torch.cuda.synchronize()
    taken, bytes_ = time.perf_counter() - begun, free - torch.cuda.mem_get_info()[0]
    print(f"\n{run}: {len(prompts.shapes)} graphs of 24 layers: {taken:.1f} s, {bytes_ / 1e9:.2f} GB")
    for count in (200, *TOKENS):
        tokens = drawn({0: count}, count)

        def eager(tokens: Mapping[int, list[int]] = tokens) -> None:
            model.reset()
            request = request_of(model, tokens)
            model.body(torch.tensor(tokens[0], device="cuda"), model.planner.plan(request))

        def replayed(tokens: Mapping[int, list[int]] = tokens) -> None:
            model.reset()
            in_a_graph(model, prompts, tokens)

        by_launch, by_graph = milliseconds(eager), milliseconds(replayed)
        print(f"{count:5} tokens: eager {by_launch:7.2f} ms, in a graph {by_graph:7.2f} ms")
        assert by_graph < by_launch


def milliseconds(work: Any) -> float:
    """Median time of a pass, from the host's first call to the GPU's end."""
    found = []
    with torch.no_grad():
        for turn in range(8):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            work()
            torch.cuda.synchronize()
            if turn >= 3:
                found.append(1e3 * (time.perf_counter() - begun))
    return sorted(found)[len(found) // 2]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


SERVED_DRAFTS = {"alone": None, "mtp": drafted_server.mtp(3), "dspark": drafted_server.DSPARK}
READ = ("output_token_logprobs", "input_token_logprobs", "spec_verify_ct", "spec_correct_drafts_histogram")
"""What answers say of the bits behind a prompt: with a draft also the rounds, and how many guesses were right."""


@pytest.mark.gpu
@pytest.mark.server
@pytest.mark.parametrize("draft", SERVED_DRAFTS.values(), ids=[*SERVED_DRAFTS])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=TWO_GPUS)])
def test_a_server_answers_as_one_without(
    ranks: int, draft: drafted_server.Draft | None, serve: ServerPool, tmp_path_factory: pytest.TempPathFactory
):
    """Bit for bit where a pass has as many tokens as its graph: cold, behind a cached prefix, divided over ranks.

    A sum over two ranks has no order. Guesses are right or wrong alike; with random weights few are right.
    """
    (target,) = native.targets()
    shapes = {**SERVED, "moe_intermediate_size": 128}  # a rank's share is 64
    flags: tuple[str, ...] = (*FLAGS, "--chunked-prefill-size", str(TOKENS[-1]), "--tp-size", str(ranks))
    if draft is not None:
        shapes, flags = {**shapes, "draft": draft.kind}, (*flags, *draft.flags)
    checkpoint = native.write_checkpoint(target, tmp_path_factory.mktemp("served"), seed=3, **shapes)
    first = prompt(512, seed=9)
    # EAGLE caches pairs of tokens, of which a prefix has one less: the second page of 256 is not whole.
    cached = 256 if draft is not None and draft.kind == "mtp" else 512

    def answers(switch: str) -> tuple[list[Any], dict[str, Any]]:
        server = serve(checkpoint, *flags, environment={SWITCH: switch})
        begun = server.info()["prompt_graphs"]["replays"]
        found = [generate(server, prompt(n, seed=7), 20) for n in TOKENS]
        found += [generate(server, ids, 20) for ids in (first, [*first, *prompt(256, seed=10)])]
        assert found[-1]["meta_info"]["cached_tokens"] == cached
        found.append(generate(server, prompt(256, seed=12), 20, logprob_start_len=0))
        for n in (5, 300, 700):  # padded: served, and no more is said here
            assert len(generate(server, prompt(n, seed=8), 20)["output_ids"]) == 20
        info = server.info()["prompt_graphs"]
        bits = [[answer["meta_info"].get(name) for name in READ] for answer in found]
        return bits, {**info, "replays": info["replays"] - begun}

    captured, info = answers("1")
    assert info == {"tokens": [*TOKENS], "replays": 10}
    eager, none = answers("0")
    assert none == {"tokens": [], "replays": 0}
    assert captured == eager
