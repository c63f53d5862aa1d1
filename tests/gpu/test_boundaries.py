"""What boundaries carry beside a plain pass: a range of layers, several tokens of a request in a decode step.

No server asks for either yet. One GPU target stands for all, since they differ in their GEMMs alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.model.contract import PassKind
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.target import modes
from tests.support import native
from tests.support.interpreted import ON_GPU
from tests.support.lockstep import check_writes, contents, overwrite, relative_errors, replace_sublayers

SHAPES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 6, "index_topk": 512}
"""A layer of each kind, and nothing to choose: what rounds apart must not flip a choice."""
PROMPT, STEP = {0: [5, 61, 7], 1: [401]}, {0: [12, 77], 1: [8, 41]}
"""The step closes a ratio-4 window of the first request, and not with its last token."""
Case = tuple[str, Path]


@pytest.fixture(scope="module", params=(native.targets()[0], "cpu"))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A target, and a checkpoint in which errors stay as small as they are made."""
    target: str = request.param
    path = native.write_checkpoint(target, tmp_path_factory.mktemp("tiny"), seed=11, mode=modes(target)[0], **SHAPES)
    if target == "cpu":
        yield target, path
        return
    with native.gemms(target):
        yield target, path


def standalone(case: Case, layers: range | None = None) -> Standalone:
    target, path = case
    device = "cuda" if ON_GPU and target != "cpu" else "cpu"
    return Standalone(path, target=target, device=device, packed=True, requests=2, capacity=256, layers=layers)


@torch.no_grad()
def test_ranges_of_layers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range hands its streams to the next, as stages of a pipeline do; between mHC sites both compute alike."""
    ranges = range(2), range(2, SHAPES["num_hidden_layers"])
    whole, *stages = (standalone(case, layers) for layers in (None, *ranges))
    work = whole.begin({0: [5, 61]})
    results = []
    for models in ([whole], stages):
        streams = whole.decoder.embed(work.ids, whole.table)
        for model in models:
            replace_sublayers(model, monkeypatch)
            part = model.decoder.range
            assert len(model.decoder.layers) == len(part)
            streams = model.decoder(streams, work.ids, work.step, model.caches.layers[part.start : part.stop])
            assert streams.dim() == (2 if part.stop == SHAPES["num_hidden_layers"] else 3)
        results.append(streams.float())
    assert bool((relative_errors(*results) < 0.01).all())


@torch.no_grad()
def test_several_tokens_of_a_request_in_a_decode_step(case: Case) -> None:
    """As the same tokens in a chunk, whose numbers of tokens the scheduler tells: logits, and what caches hold."""
    model = standalone(case)
    model.extend(PROMPT)
    before = [{name: store.clone() for name, store in contents(cache).items()} for cache in model.caches.layers]
    chunk = model.request(STEP)
    ids = torch.tensor([token for tokens in STEP.values() for token in tokens]).to(model.device)
    assert chunk.added is not None
    results = []
    for request in (chunk, replace(chunk, kind=PassKind.VERIFY, added=None, tokens_each=2, longest=None)):
        for cache, bytes_ in zip(model.caches.layers, before, strict=True):
            overwrite(cache, bytes_)
        streams = model.decoder.embed(ids, model.table)
        step = model.planner.plan(request)
        logits = model.logits(model.decoder(streams, ids, step, model.caches.layers))
        assert bool(torch.isfinite(logits).all())
        results.append((logits, [{n: s.clone() for n, s in contents(cache).items()} for cache in model.caches.layers]))
    (expected, told), (found, after) = results
    assert float((found.log_softmax(-1) - expected.log_softmax(-1)).abs().max()) < 1e-3
    for layer, earlier in enumerate(before):
        assert any(
            not torch.equal(found.nan_to_num(), earlier[name].nan_to_num()) for name, found in told[layer].items()
        )
        check_writes(after[layer], told[layer], earlier, 0.01)
