"""Every sublayer of the GPU decoder against the CPU reference's on the same inputs and the same cached bytes.

Log-probabilities of a whole random model hide what a sublayer gets a little wrong. Here both sides start from equal
bits, so they differ by roundings of intermediate results to bf16 alone: below a percent of the output's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.checkpoint.tiny import write_tiny
from nvfp4_sgl.gpu import step as step_module
from nvfp4_sgl.gpu.standalone import GpuStandalone
from nvfp4_sgl.gpu.step import Scratch, Step
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.triton_kernels.indexer import topk
from tests.support.interpreted import ON_GPU

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

BOUND = 0.025
"""Of a row's relative error in attention: where a query sees few entries, an 8-bit code of one that rounds to the other
side shows. A query that chooses entries may choose another near the margin; then its row differs by much more."""


@dataclass
class Pair:
    """Both decoders on one checkpoint, with the same slots for the same tokens."""

    ours: GpuStandalone
    reference: Standalone


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=5, num_hidden_layers=len(LAYERS))
    ours = GpuStandalone(path, device=DEVICE, requests=3, capacity=768)
    return Pair(ours, Standalone(path, packed=True, dtype=torch.bfloat16, requests=3, capacity=768))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def inputs(pair: Pair, tokens: int, seed: int) -> Tensor:
    """Activations as a norm leaves them, bf16 [tokens, d]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, pair.reference.config.hidden_size, generator=generator).bfloat16()


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Root mean square error of each row by its root mean square; [rows]."""
    found, expected = found.float().cpu().flatten(1), expected.float().flatten(1)
    assert found.shape == expected.shape and bool(torch.isfinite(found).all())
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


def contents(cache: LayerCache) -> dict[str, Tensor]:
    """Pages, uint8, and states, fp32, by name."""
    stores = {field.name: getattr(cache, field.name) for field in fields(cache)}
    present = {name: store for name, store in stores.items() if store is not None}
    return {name: getattr(store, "pages", store) for name, store in present.items()}


def fill_caches(pair: Pair, layer: int) -> dict[str, Tensor]:
    """Let the reference run the first :data:`CACHED` tokens, and give its bytes to both; returns a copy of them."""
    pair.reference.reset()
    plan = pair.reference.caches.plan(CACHED)
    source, target = (model.caches.layers[layer] for model in (pair.reference, pair.ours))
    pair.reference.decoder.layers[layer].attn(inputs(pair, sum(CACHED.values()), 0), plan, source)
    for name, store in contents(target).items():
        store.copy_(contents(source)[name])
    pair.ours.caches.lengths = list(pair.reference.caches.lengths)
    return {name: store.clone() for name, store in contents(source).items()}


def check_writes(pair: Pair, layer: int, before: dict[str, Tensor]) -> None:
    """Since ``before`` both wrote the same places, and the same there but for codes and last bits that round apart."""
    ours, theirs = (contents(model.caches.layers[layer]) for model in (pair.ours, pair.reference))
    for name, earlier in before.items():
        found, expected = ours[name].cpu(), theirs[name]
        if expected.dtype == torch.uint8:
            written = (found != earlier) | (expected != earlier)
            share = float((found != expected).sum() / written.sum())
            assert share < 0.2, f"{name}: {share:.0%} of the bytes written differ"
        else:
            assert torch.equal(found.isnan(), expected.isnan()), f"{name}: other rows were written"
            assert float((found - expected).abs().nan_to_num().max()) < 0.03, f"{name} differs"


def attend(pair: Pair, layer: int, counts: dict[int, int], x: Tensor) -> tuple[Tensor, Tensor, Step]:
    """One pass of both, [T, d] each, and what our side ran."""
    work = pair.ours.begin({request: [0] * count for request, count in counts.items()})
    work.step.prepare(pair.ours.decoder.frequencies, work.ends, work.added)
    found = pair.ours.decoder.layers[layer].attn(x.to(DEVICE), work.step, pair.ours.caches.layers[layer])
    plan = pair.reference.caches.plan(counts)
    expected = pair.reference.decoder.layers[layer].attn(x, plan, pair.reference.caches.layers[layer])
    return found, expected, work.step


@pytest.mark.parametrize("layer", LAYERS)
def test_attention(layer: int, pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """Index scores come in parts of :data:`SCORED_AT_ONCE` queries, except in a decode pass, whose shapes may depend
    on the batch size alone. The longest request's are chosen from in chunks of :data:`CHOSEN_AT_ONCE`."""
    monkeypatch.setattr(step_module, "SCORE_VALUES", SCORED_AT_ONCE * step_module.index_entries(520))
    monkeypatch.setattr(topk, "CHUNK", CHOSEN_AT_ONCE)
    monkeypatch.setattr(pair.ours.decoder, "scratch", Scratch(torch.device(DEVICE)))
    before = fill_caches(pair, layer)
    for seed, counts in enumerate(PASSES, start=1):
        x = inputs(pair, sum(counts.values()), seed)
        found, expected, step = attend(pair, layer, counts, x)
        assert layer != CSA or step.candidates.nominated.shape[1] > 1
        assert step.scores.shape[0] == (len(x) if len(x) == len(counts) else SCORED_AT_ONCE)
        errors = dict(zip(counts, relative_errors(found, expected).split(list(counts.values())), strict=True))
        for request, rows in errors.items():
            chooses = layer == CSA and CACHED.get(request, 0) // 4 > pair.reference.config.index_topk
            assert bool((rows < (0.3 if chooses else BOUND)).all())
            assert bool(rows.median() < BOUND)
        assert not step.candidates.arrivals.any()
    check_writes(pair, layer, before)


@pytest.mark.parametrize("layer", LAYERS)
def test_experts(layer: int, pair: Pair):
    x, ids = inputs(pair, 5, 9), torch.tensor([3, 400, 17, 511, 60])
    found = pair.ours.decoder.layers[layer].ffn(x.to(DEVICE), ids.to(DEVICE))
    errors = relative_errors(found, pair.reference.decoder.layers[layer].ffn(x, ids))
    assert bool((errors < 0.01).all()), errors


def replace_sublayers(model: GpuStandalone | Standalone, monkeypatch: pytest.MonkeyPatch) -> None:
    """By permutations of the columns, each another, times a gain that is another for each place and token id."""

    def attention(layer: int) -> Callable[[Tensor, object, LayerCache], Tensor]:
        def attend(x: Tensor, plan: object, cache: LayerCache) -> Tensor:
            assert cache is model.caches.layers[layer]
            return x.roll(2 * layer + 1, dims=1) * (0.25 + 0.5 * layer)

        return attend

    def experts(layer: int) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, ids: x.roll(2 * layer + 2, dims=1) * (0.5 * layer + ids[:, None].to(x) / 256)

    for layer, block in enumerate(model.decoder.layers):
        monkeypatch.setattr(block.attn, "forward", attention(layer))
        monkeypatch.setattr(block.ffn, "forward", experts(layer))


def test_hyper_connections(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """The streams' way through all sites, with sublayers in between that both compute alike."""
    for model in (pair.ours, pair.reference):
        replace_sublayers(model, monkeypatch)
    ids = torch.tensor([7, 300])
    pair.ours.reset()
    work = pair.ours.begin({0: ids.tolist()})
    streams = inputs(pair, len(ids) * pair.reference.config.hc_mult, 9).view(len(ids), -1, pair.ours.config.hidden_size)
    found = pair.ours.decoder(streams.clone().to(DEVICE), work.ids, work.step, pair.ours.caches.layers)
    pair.reference.reset()
    plan = pair.reference.caches.plan({0: len(ids)})
    expected = pair.reference.decoder(streams, ids, plan, pair.reference.caches.layers)
    errors = relative_errors(found, expected)
    assert bool((errors < 0.01).all()), errors
