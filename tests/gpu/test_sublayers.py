"""Every sublayer of the GPU targets against the CPU reference's on the same inputs and the same cached bytes.

Both sides start from equal bits (``tests.support.lockstep``), so they differ by roundings of intermediate results
alone: to bf16 in ``w4a16``, where that is below a percent of the output's size; in ``w4a4`` also to FP4, where a bf16
that rounds to the other side may move a code by a quarter of its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from nvfp4_sgl.model.layer import Block
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.fused import attention
from nvfp4_sgl.targets.fused import step as step_module
from nvfp4_sgl.targets.fused.step import Scratch
from nvfp4_sgl.targets.target import modes
from nvfp4_sgl.triton_kernels.indexer import scores, topk
from tests.support import native
from tests.support.interpreted import ON_GPU
from tests.support.lockstep import (
    Recording,
    activations,
    check_writes,
    record,
    relative_errors,
    replace_sublayers,
    replay,
)

DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS = range(3)
"""Window-only, CSA and HCA; the first two route by a hash of the token, the last by scores."""

CACHED = {1: 254, 2: 515}
"""Tokens in the caches beforehand, by request; the longest has twice the ratio-4 entries that a query may choose."""

PASSES = ({0: 5, 2: 4, 1: 3}, {2: 1, 0: 1, 1: 1})
"""Tokens that each pass adds: chunks over edges of ratio-4 windows and of a ratio-128 window, then a decode step."""

CSA = 1
SCORED_AT_ONCE = 2
CHOSEN_AT_ONCE = 128


@dataclass(frozen=True)
class Bounds:
    """Relative errors of rows that roundings explain.

    Attributes:
        attention, experts: of any row. median: of the rows of attention.
        choosing: of a row of attention that chooses entries, where it may choose another near the margin.
        written: share of the cached bytes that differ.
    """

    attention: float
    median: float
    choosing: float
    experts: float
    written: float


BOUNDS = {
    ActivationMode.W4A16: Bounds(attention=0.025, median=0.025, choosing=0.3, experts=0.01, written=0.2),
    ActivationMode.W4A4: Bounds(attention=0.2, median=0.12, choosing=0.35, experts=0.01, written=0.2),
}
"""Found on SM100, interpreted: 0.02 to 0.12 a row, median 0.07; experts 0.003."""
MXFP8_BOUNDS = Bounds(attention=0.06, median=0.04, choosing=0.35, experts=0.01, written=0.2)
"""On SM100 with attention and the shared expert in FP8. Found, interpreted: 0.002 to 0.036 a row, median 0.02; experts
0.003."""


FORMATS = {
    ActivationMode.W4A16: ("nvfp4-full", "nvfp4-experts", "bf16"),
    ActivationMode.W4A4: ("nvfp4-full", "nvfp4-experts"),
}
"""What runs in a mode: all packed, routed experts alone, nothing."""
CASES = [(run, name) for run in native.runs() for name in FORMATS[run.mode]]
Case = tuple[native.Run, str]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with native.gemms(request.param[0].target):
        yield request.param


@pytest.fixture(scope="module")
def run(case: Case) -> native.Run:
    return case[0]


@pytest.fixture(scope="module")
def bounds(case: Case) -> Bounds:
    is_mxfp8 = case[0].mode is ActivationMode.W4A4 and case[1] == "nvfp4-experts"
    return MXFP8_BOUNDS if is_mxfp8 else BOUNDS[case[0].mode]


@pytest.fixture(scope="module")
def checkpoint(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, case[1], seed=5, num_hidden_layers=len(LAYERS))
    return path


@pytest.fixture(scope="module")
def recording(run: native.Run, checkpoint: Path) -> Recording:
    generator = torch.Generator().manual_seed(1)
    passes = [
        {r: torch.randint(2, 500, (count,), generator=generator).tolist() for r, count in counts.items()}
        for counts in PASSES
    ]
    return record(checkpoint, mode=run.mode, cached=CACHED, passes=passes, capacity=768)


@pytest.fixture(scope="module")
def ours(run: native.Run, checkpoint: Path) -> Standalone:
    return Standalone(checkpoint, target=run.target, mode=run.mode, device=DEVICE, requests=3, capacity=768)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("layer", LAYERS)
def test_sublayers(
    layer: int, bounds: Bounds, ours: Standalone, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Index scores come in parts of :data:`SCORED_AT_ONCE` queries, except in a decode pass, whose shapes may depend
    on the batch size alone. The longest request's are chosen from in chunks of :data:`CHOSEN_AT_ONCE`."""
    monkeypatch.setattr(step_module, "MAX_SCORES_AT_ONCE", SCORED_AT_ONCE * step_module.index_entries(520))
    monkeypatch.setattr(topk, "CHUNK_SCORES", CHOSEN_AT_ONCE)
    monkeypatch.setattr(ours.planner, "scratch", Scratch(torch.device(DEVICE)))
    topk_entries = ours.config.index_topk
    for tokens, row, told in zip(PASSES, replay(ours, recording, [layer]), recording.layers, strict=True):
        found, expected = row[layer], told[layer]
        count = sum(tokens.values())
        if layer == CSA:
            assert found.step.candidates.nominated.numel()
            assert found.step.scores.shape[0] == (count if count == len(tokens) else SCORED_AT_ONCE)
        errors = relative_errors(found.attention, expected.attention[1])
        for request, rows in zip(tokens, errors.split(list(tokens.values())), strict=True):
            chooses = layer == CSA and CACHED.get(request, 0) // 4 > topk_entries
            assert bool((rows < (bounds.choosing if chooses else bounds.attention)).all()), rows
        assert float(errors.median()) < bounds.median
        assert not found.step.candidates.semaphores.any()
        experts = relative_errors(found.experts, expected.experts[1])
        assert bool((experts < bounds.experts).all()), experts
        check_writes(found.after, expected.after, expected.before, bounds.written)


@pytest.mark.parametrize(("cached", "scored"), [(0, False), (240, False), (250, True)])
def test_only_passes_with_a_choice_are_scored(
    cached: int, scored: bool, ours: Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 64 entries every query takes all that it sees."""
    calls: list[Any] = []

    def index_scores(*arguments: Any, **options: Any) -> None:
        calls.append(arguments)
        scores.index_scores(*arguments, **options)

    monkeypatch.setattr(attention, "index_scores", index_scores)
    ours.reset()
    ours.caches.lengths[0] = cached
    work = ours.begin({0: [7] * 12})
    config, select = ours.config, cast(Block, ours.decoder.layers[CSA]).attn.select
    index_q = activations(12, config.index_n_heads * config.index_head_dim, 3).bfloat16().to(DEVICE)
    weights = activations(12, config.index_n_heads, 4).to(DEVICE)
    slots, lengths = cast(Any, select)(index_q, weights, work.step, ours.caches.layers[CSA])
    assert bool(calls) == scored
    assert lengths.tolist() == [min((cached + n) // 4, config.index_topk) for n in range(1, 13)]
    assert all(int((row >= 0).sum()) == count for row, count in zip(slots, lengths, strict=True))


def test_the_other_mode_of_a_target_is_seen(case: Case, checkpoint: Path, bounds: Bounds, recording: Recording) -> None:
    """Experts whose activations are rounded where they should not be, or not where they should: each row is off."""
    (target, mode), format = case
    others = [each for each in modes(target) if each is not mode]
    if not others or format == "bf16":
        pytest.skip("there is no other mode, or it does the same")
    model = Standalone(checkpoint, target=target, mode=others[0], device=DEVICE, requests=3, capacity=768)
    for row, told in zip(replay(model, recording, [CSA]), recording.layers, strict=True):
        errors = relative_errors(row[CSA].experts, told[CSA].experts[1])
        assert bool((errors > 2 * bounds.experts).all()), errors


def test_hyper_connections(ours: Standalone, checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    """The streams' way through all sites, with sublayers in between that both compute alike."""
    reference: Any = Standalone(checkpoint, packed=True, dtype=torch.bfloat16, requests=1, capacity=256)
    ids = torch.tensor([7, 300])
    streams = activations(len(ids) * ours.config.hc_mult, ours.config.hidden_size, 9)
    streams = streams.view(len(ids), -1, ours.config.hidden_size)
    results = []
    for model in (ours, reference):
        replace_sublayers(model, monkeypatch)
        model.reset()
        work = model.begin({0: ids.tolist()})
        results.append(model.decoder(streams.clone().to(model.device), work.ids, work.step, model.caches.layers))
    errors = relative_errors(results[0].float().cpu(), results[1].float())
    assert bool((errors < 0.01).all()), errors
