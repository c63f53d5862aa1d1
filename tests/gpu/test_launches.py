"""What a pass launches, found by a dry run: few kernels a layer, and none that the warm-up has not compiled."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_sgl import prompt_sizes
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.checkpoint.reader import reader_for
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import LayerKind, RopeTable
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.common.clusters import B200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.errors import LibraryError
from nvfp4_sgl.model import static_prompt
from nvfp4_sgl.model.contract import PassKind, PassRequest, Slots
from nvfp4_sgl.model.layer import Block, Walk
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.fused import attention, compile_ahead, gemm_bf16, gemm_planner
from nvfp4_sgl.triton_kernels.attention_inputs.index_weights import MAX_TOKENS
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import TWO_LAUNCH_MIN_TOKENS
from nvfp4_sgl.triton_kernels.common import chip
from tests.support import native, python_calls
from tests.support.dry_launches import Launch, dry_launches, explained
from tests.support.full import but_for
from tests.support.interpreted import INTERPRETED
from tests.support.reference_gemms import DryLauncher, dry_gemms

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a dry run replaces the interpreter's")

LAYERS = range(3)
REQUESTS, CAPACITY = 24, 4096
LARGEST_PREFILL = 2048
MAX_LAUNCHES = {LayerKind.CSA: 9, LayerKind.HCA: 7, LayerKind.SWA: 7}
"""Launches of a decode layer beside GEMMs, while the experts' one gathers its tokens; else one more sorts them."""
GATHERED_REQUESTS = 8


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is split as on a chip of that many processors."""
    monkeypatch.setattr(chip, "processors", lambda device: 132)


MAX_LAUNCHES_SM100 = {LayerKind.CSA: 17, LayerKind.HCA: 15, LayerKind.SWA: 15}
"""Launches of a decode layer at one token on SM100: kernels, GEMMs and quantisers; collectives not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=3, num_hidden_layers=len(LAYERS), n_routed_experts=6)
    with dry_gemms("sm_90a"):
        yield Standalone(path, target="sm_90a", device="cpu", requests=REQUESTS, capacity=CAPACITY)


@pytest.mark.parametrize("requests", [1, 8, 24])
def test_launches_of_a_decode_layer(requests: int, model: Standalone):
    model.reset()
    with dry_launches(), torch.no_grad():
        for request in range(requests):
            model.extend({request: [7] * 2500})
        work = model.begin({request: [7] for request in range(requests)})
        streams = torch.zeros(requests, 4, model.config.hidden_size, dtype=torch.bfloat16)
        for layer in LAYERS:
            block, cache = cast(Block, model.decoder.layers[layer]), model.caches.layers[layer]
            sublayers, entered = block.sublayers(work.ids, work.step, cache), block.hc_attn.enter(streams, work.step)
            with dry_launches() as launches:
                Walk(sublayers, block.hc_attn, streams, work.step, entered=entered).finish()
            kind = model.config.kind(layer)
            most = MAX_LAUNCHES[kind] + (requests > GATHERED_REQUESTS)
            most += kind is LayerKind.CSA and requests > MAX_TOKENS  # index weights
            assert len(launches) <= most, f"{kind.name}: {Counter(launch.name for launch in launches)}"


def test_a_layout_for_a_million_tokens_tiles_attention_of_few_requests_as_a_short_one(tmp_path: Path, monkeypatch):
    """Its lists of ratio-128 entries are wide, but mostly few columns count."""
    write_tiny(
        tmp_path, "nvfp4-full", seed=3, num_hidden_layers=len(LAYERS), n_routed_experts=6, num_attention_heads=32
    )
    with dry_gemms("sm_90a"), torch.no_grad():
        model = Standalone(tmp_path, target="sm_90a", device="cpu", requests=REQUESTS, capacity=CAPACITY)
        slots = model.planner.slots

        def tilings(longest: int) -> list[object]:
            """Heads of a program of attention, layer by layer."""
            monkeypatch.setattr(model.planner, "slots", replace(slots, longest=longest))
            with dry_launches() as launches:
                model.forward(model.begin({request: [7] for request in range(16)}))
            return [dict(launch.variant)["HEADS"] for launch in launches if launch.name == "attend"]

        short = tilings(16384)
        assert len(short) == len(LAYERS) and tilings(1 << 20) == short


@contextmanager
def counted_products() -> Iterator[list[str]]:
    """Library GEMMs inside the block, none computed."""
    seen: list[str] = []

    def count(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        seen.append("multiply")
        return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)

    with mock.patch.object(gemm_bf16, "multiply", count):
        yield seen


@contextmanager
def placed(gemms: DryLauncher, launches: list[Launch]) -> Iterator[list[int]]:
    """How many of Triton's ``launches`` are in front of each GEMM inside the block."""
    places: list[int] = []
    note = gemms.note

    def noted(key: KernelKey) -> None:
        places.append(len(launches))
        note(key)

    with mock.patch.object(gemms, "note", noted):
        yield places


def check_counts_are_ready(names: list[str], gemms: list[KernelKey], places: list[int]) -> None:
    """In front of a GEMM that reads counts ahead is a launch that waits before it triggers, and did not write them.

    Gates and ups follow a kernel of Triton's behind the routing; down follows gates and ups.
    """
    ahead = [number for number, key in enumerate(gemms) if key.shape.grouped]
    assert all(gemms[number].shape == replace(gemms[number].shape, counts_ahead=True) for number in ahead)
    gate_up, down = ahead
    in_front = names[: places[gate_up]]
    assert places[gate_up - 1] < places[gate_up] and in_front[-1] == "_quantize_scattered_kernel"
    assert any(name.startswith("_route") for name in in_front[:-1])
    assert (gemms[gate_up].shape.gated, down, places[down]) == (True, gate_up + 1, places[gate_up])


def test_launches_of_a_decode_layer_on_sm100(tmp_path: Path) -> None:
    write_tiny(tmp_path, "nvfp4-full", seed=3, num_hidden_layers=len(LAYERS), n_routed_experts=6)
    with dry_gemms() as gemms, torch.no_grad():
        model = Standalone(tmp_path, target="sm_100a", requests=1, capacity=CAPACITY)
        with dry_launches():
            model.extend({0: [7] * 2500})
            work = model.begin({0: [7]})
            streams = torch.zeros(1, 4, model.config.hidden_size, dtype=torch.bfloat16)
            for layer in LAYERS:
                block, cache = cast(Block, model.decoder.layers[layer]), model.caches.layers[layer]
                sublayers, entered = (
                    block.sublayers(work.ids, work.step, cache),
                    block.hc_attn.enter(streams, work.step),
                )
                gemms.keys.clear()
                with dry_launches() as launches, counted_products() as products, placed(gemms, launches) as places:
                    Walk(sublayers, block.hc_attn, streams, work.step, entered=entered).finish()
                check_counts_are_ready([launch.name for launch in launches], gemms.keys, places)
                kind = model.config.kind(layer)
                names = Counter([launch.name for launch in launches] + products + ["GEMM"] * len(gemms.keys))
                print(f"{kind.name}: {names.total()} launches {dict(names)}")
                assert len(gemms.keys) == 6
                assert names.total() <= MAX_LAUNCHES_SM100[kind], f"{kind.name}: {names}"


MAX_LAUNCHES_MTP = 32
"""Launches of an MTP block over a prompt: the plan, its input, Triton kernels and GEMMs."""


@torch.no_grad()
def test_launches_of_an_mtp_block_over_a_prompt(tmp_path: Path) -> None:
    """So few that Python launches them while the GPU runs the target's graph: they run eagerly.

    The draft's matrices are FP8 and MXFP4, as in releases.
    """
    write_tiny(tmp_path, "nvfp4-experts", seed=3, num_hidden_layers=len(LAYERS), n_routed_experts=6, draft="mtp")
    with dry_gemms("sm_90a") as gemms:
        model = Standalone(tmp_path, target="sm_90a", requests=1, capacity=CAPACITY)
        reader = reader_for(verify(tmp_path).inventory, model.device, of_draft=True)
        draft = MtpDraft(replace(model.decoder.context, source=reader))
        config = replace(model.config, num_hidden_layers=1, layer_kinds=(LayerKind.SWA,))
        caches = LocalCaches(config, capacity=CAPACITY, packed=True, dtype=model.dtype)
        context, slots = replace(draft.context, config=config), replace(model.planner.slots, table=caches.slots.int())
        planner = context.boundaries.plan(context, slots, caches.layers)
        request = model.begin({0: [7] * 1024}).request
        ids = torch.zeros_like(request.positions)
        streams = torch.zeros(len(ids), model.config.hc_mult, model.config.hidden_size, dtype=torch.bfloat16)
        gemms.keys.clear()
        with dry_launches() as launches, counted_products() as products:
            draft(streams[:, 0].contiguous(), streams, ids, planner.plan(request), caches.layers[0])
        names = Counter([launch.name for launch in launches] + products + ["GEMM"] * len(gemms.keys))
        print(f"{names.total()} launches {dict(names)}")
        assert len(gemms.keys) > 5 and names.total() <= MAX_LAUNCHES_MTP, names


@pytest.mark.parametrize("tokens", [TWO_LAUNCH_MIN_TOKENS - 1, TWO_LAUNCH_MIN_TOKENS])
def test_latents_of_a_large_prefill_are_launched_apart(tokens: int, model: Standalone):
    model.reset()
    with dry_launches() as launches:
        model.extend({0: [7] * tokens})
    compressing = sum(model.config.kind(layer) is not LayerKind.SWA for layer in LAYERS)
    assert compressing
    expected = len(LAYERS) + (compressing if tokens >= TWO_LAUNCH_MIN_TOKENS else 0)
    assert Counter(launch.name for launch in launches)["_attention_inputs"] == expected


class Fills(TorchDispatchMode):
    """Names of the operators that write a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in function.__name__ for word in ("zero", "fill", "full", "ones")):
            self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_a_pass_fills_nothing(model: Standalone):
    """Counters are zero before a pass because the one before left them so; a captured graph would repeat a fill."""
    model.reset()
    for count in (5, 1):
        work = model.begin({0: [7] * count})
        with dry_launches(), Fills() as fills:
            model.planner.fill(work.step, work.request)
            model.forward(work)
        assert not fills.names


def test_a_captured_pass_of_several_tokens_fills_nothing(model: Standalone):
    """What says how many tokens each request adds is made before the capture."""
    model.reset()
    model.planner.reserve(REQUESTS)
    request = model.begin({0: [7, 7], 1: [7, 7]}).request
    request = PassRequest(request.positions, request.requests, request.ends, PassKind.VERIFY, tokens_each=2)
    step = model.planner.capture(request)
    with dry_launches(), Fills() as fills:
        model.planner.fill(step, request)
    assert not fills.names


EAGER_BYTES = 512 * 1024
"""More than a token of this model's decode pass allocates: rows of experts, padded, are most of it."""


def test_what_a_graph_writes_stays_allocated(model: Standalone):
    """Whoever captures may forget the step: the backend does, and a graph keeps nothing that was made before it."""
    model.planner.reserve(REQUESTS)
    kept = []
    for requests in (1, 3):
        request = model.begin({number: [7] for number in range(requests)}).request
        step = model.planner.capture(request)
        kept += [weakref.ref(step.plan.window_slots), weakref.ref(step.cos_sin[RopeTable.WINDOW])]
        del step
    model.planner.plan(request)
    gc.collect()
    assert all(reference() is not None for reference in kept)


def test_an_eager_decode_pass_is_laid_out_as_a_captured_one(model: Standalone):
    """For the longest sequence that may come, whatever the pass's own: sums are in the same order."""
    model.reset()
    model.planner.reserve(REQUESTS)
    request = model.begin({0: [7]}).request
    assert request.kind is PassKind.DECODE and request.longest == 1
    verify = PassRequest(request.positions, request.requests, request.ends, PassKind.VERIFY, longest=1)
    block = replace(verify, kind=PassKind.BLOCK)
    for one in (request, verify, block):
        eager, captured = model.planner.plan(one), model.planner.capture(replace(one, longest=None))
        assert eager.plan.entry_slots.shape == captured.plan.entry_slots.shape
        assert eager.plan.batch.pages.shape == captured.plan.batch.pages.shape
        assert eager.scores.shape == captured.scores.shape


@pytest.mark.parametrize("kind", [PassKind.DECODE, PassKind.VERIFY, PassKind.EXTEND], ids=lambda kind: kind.name)
def test_ratio_128_is_tiled_for_short_sequences_where_a_graph_may_hold_it(
    kind: PassKind, model: Standalone, monkeypatch: pytest.MonkeyPatch
):
    """Its columns are those of the longest sequence in passes that verify, too."""
    model.reset()
    work, expected = model.begin({0: [7]}), []
    added = torch.ones(1, dtype=torch.int32) if kind is PassKind.EXTEND else None
    request = replace(work.request, kind=kind, added=added)
    monkeypatch.setattr(attention, "sparse_attention", lambda *given, **more: expected.append(more["expected_extra"]))
    with dry_launches():
        model.forward(replace(work, request=request, step=model.planner.plan(request)))
    few = attention.HCA_ENTRIES if kind.is_by_size else None
    assert expected == [few if model.config.kind(layer) is LayerKind.HCA else None for layer in LAYERS]
    assert LayerKind.HCA in model.config.layer_kinds


@pytest.mark.parametrize(("kind", "each"), [(PassKind.VERIFY, 3), (PassKind.EXTEND, None), (PassKind.DECODE, 1)])
def test_attention_is_told_whose_queries_see_the_same(
    kind: PassKind, each: int | None, model: Standalone, monkeypatch: pytest.MonkeyPatch
):
    """Not where a query chooses among ratio-4 entries, nor in decode, whose requests have one query."""
    model.reset()
    work, told = model.begin(dict.fromkeys(range(2), [7] * (each or 5))), []
    added = torch.full((2,), 5, dtype=torch.int32) if kind is PassKind.EXTEND else None
    request = replace(work.request, kind=kind, added=added, tokens_each=each or 1, longest=CAPACITY)

    def attend(*given: object, owners: Tensor | None, tokens_each: int | None, **more: object) -> None:
        told.append((None if owners is None else owners.tolist(), tokens_each))

    monkeypatch.setattr(attention, "sparse_attention", attend)
    step = model.planner.plan(request)
    with dry_launches():
        model.forward(replace(work, request=request, step=step))
    alike = step.plan.batch.owners.tolist() if kind is not PassKind.DECODE else None
    kinds = [model.config.kind(layer) for layer in LAYERS]
    assert told == [(None if layer is LayerKind.CSA else alike, each) for layer in kinds]
    assert {LayerKind.CSA, LayerKind.HCA} <= set(kinds)


def test_graphs_of_more_tokens_than_were_reserved_are_refused(model: Standalone):
    model.planner.reserve(3)
    request = PassRequest(torch.arange(4), torch.arange(2), torch.tensor([2, 4]), PassKind.VERIFY, tokens_each=2)
    with pytest.raises(AssertionError, match="reserve has run for 3 tokens, the pass has 4"):
        model.planner.capture(request)


def test_decode_passes_of_other_numbers_of_tokens_a_request(model: Standalone):
    """What is kept for one number is not taken for another."""
    for each in (3, 2):
        positions, ends = torch.arange(each).repeat(2), torch.tensor([each, each])
        step = model.planner.plan(PassRequest(positions, torch.arange(2), ends, PassKind.VERIFY, tokens_each=each))
        assert step.plan.batch.bounds.tolist() == [0, each, 2 * each]
        assert step.plan.batch.owners.tolist() == [0] * each + [1] * each


class Allocations(TorchDispatchMode):
    """Bytes of memory without contents, which is what the package's own code allocates in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()  # by operator

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if "empty" in function.__name__:
            self.bytes[function.__name__] += result.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("requests", [1, 16])
def test_an_eager_decode_pass_allocates_by_its_tokens_alone(requests: int, model: Standalone):
    """As much behind many cached tokens as behind few, and little for each; a first pass leaves workspaces behind."""
    found = []
    for cached in (20, 20, 2500):
        model.reset()
        with dry_launches():
            for request in range(requests):
                model.extend({request: [7] * cached})
            with Allocations() as allocations:
                model.forward(model.begin({request: [7] for request in range(requests)}))
        found.append(allocations.bytes)
    assert found[1] == found[2]
    assert 0 < found[2].total() <= requests * EAGER_BYTES, found[2]


@pytest.mark.parametrize("run", but_for(native.runs(on_gpu=False), *native.runs(on_gpu=False)[:-1]), ids=str)
def test_nothing_compiles_after_the_warm_up(run: native.Run, tmp_path: Path) -> None:
    """Passes of random requests launch no variant of a kernel, and no GEMM, that the warm-up did not.

    For Hopper in CI: ``tests/model/test_compile_ahead.py``.
    """
    choose = random.Random(0)
    write_tiny(tmp_path, "nvfp4-full", seed=3, num_hidden_layers=len(LAYERS))
    with dry_gemms(run.target):
        model = Standalone(tmp_path, target=run.target, mode=run.mode, requests=REQUESTS, capacity=CAPACITY)
        slots = torch.zeros(2, CAPACITY, dtype=torch.int32)
        planner = model.decoder.context.boundaries.plan(
            model.decoder.context, Slots(slots, model.caches.full_to_swa, REQUESTS, CAPACITY), model.caches.layers
        )
        with dry_launches() as warmed:
            planner.warm_up(model.decoder, model.table, LARGEST_PREFILL)
        require_nothing_new(model, set(warmed), choose)
        require_nothing_new_in_prompt_graphs(model, set(warmed))


def require_nothing_new_in_prompt_graphs(model: Standalone, known: set[Launch]) -> None:
    """Their requests are as many as a server of so many has at once, or more."""
    tokens = [count for count in prompt_sizes.TOKENS if count <= LARGEST_PREFILL]
    unscored = static_prompt.unscored_length(model.config)
    among = static_prompt.shapes(tokens, prompt_sizes.REQUESTS, longest=CAPACITY, columns=CAPACITY, unscored=unscored)
    assert prompt_sizes.REQUESTS <= REQUESTS and len(among) == 2 * len(tokens) > 4
    for shape in among:
        prompt = static_prompt.StaticPrompt(shape, "cpu", model.caches.padding_request)
        step = model.planner.capture(prompt.request)
        with dry_launches() as launches, torch.no_grad():
            model.planner.fill(step, prompt.request)
            model.decoder(model.decoder.embed(prompt.ids, model.table), prompt.ids, step, model.caches.layers)
        new = [launch for launch in launches if launch not in known]
        assert not new, f"{shape}: {explained(new[0], known)}"


def require_nothing_new(model: Standalone, known: set[Launch], choose: random.Random) -> None:
    """Require that 150 random passes, and the largest there are, launch only what is known."""
    assert len(known) > 50
    for n in range(150):
        model.reset()
        count = choose.choice((1, 1, 2, 3, 5, 8, 13, 24))
        lengths = {request: choose.choice((1, 2, 3, 17, 64, 129, 300, 1000)) for request in range(count)}
        if n < 10:
            lengths = {0: LARGEST_PREFILL - n}
        if sum(lengths.values()) > LARGEST_PREFILL:
            continue
        for tokens in (lengths, dict.fromkeys(lengths, 1), {0: choose.randrange(1, 600)}):
            with dry_launches() as launches:
                model.extend({request: [7] * n for request, n in tokens.items()})
            new = [launch for launch in launches if launch not in known]
            assert not new, f"{tokens}: {explained(new[0], known)}"


def test_a_library_of_gemms_that_is_not_there_stops_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_tiny(tmp_path, "nvfp4-full", seed=3, num_hidden_layers=1, n_routed_experts=6)
    model = Standalone(tmp_path, target="sm_100a", requests=1, capacity=256)
    with launcher.use(gemm_planner.DryLauncher("sm_100a", B200_CLUSTERS)):
        needed = model.planner.gemms(64)
    monkeypatch.setattr(model.planner, "gemms", lambda tokens: needed)
    monkeypatch.setenv(compile_ahead.LIBRARY_VARIABLE, str(tmp_path / "kernels"))
    with launcher.use(launcher.CudaLauncher()), pytest.raises(LibraryError, match="found neither kernels.json"):
        model.planner.warm_up(model.decoder, model.table, 64)


MAX_PYTHON_CALLS = {"sm_90a-w4a16": 24, "sm_90a-w4a4": 19, "sm_100a-w4a4": 27}
"""Python calls of a 512-token pass for each launch, on Python 3.11. A pass whose launches are not bound makes 45, 32
and 51; one that checks each of them as well makes 76, 58 and 91."""


@pytest.mark.parametrize("run", native.runs(), ids=str)
def test_a_pass_binds_launches_that_look_the_same_once(run: native.Run, tmp_path: Path) -> None:
    write_tiny(tmp_path, "nvfp4-full", seed=3, num_hidden_layers=len(LAYERS), n_routed_experts=6)
    counts = python_calls.of_pass(tmp_path, run)
    print(f"{run}: {counts.each:.1f} Python calls for each of {counts.launches} launches")
    assert counts.launches > 50 and counts.each <= MAX_PYTHON_CALLS[str(run)]
