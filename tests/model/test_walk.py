"""A pass that is walked sublayer by sublayer: what the decoder computes, and what a draft or a stage needs of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.model.contract import Activation, Form
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.model.layer import Block, Place, Sublayer, Walk
from nvfp4_sgl.model.tokens import EveryToken
from nvfp4_sgl.standalone import Pass, Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.fused.exchange import lone_exchange
from nvfp4_sgl.weights.parallel import Collective, Slot, TensorParallel

PROMPT = list(range(5, 26))
LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Standalone:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=9, num_hidden_layers=LAYERS)
    return Standalone(path, requests=1, capacity=256)


def begin(model: Standalone) -> tuple[Pass, Tensor]:
    model.reset()
    work = model.begin({0: PROMPT})
    return work, model.decoder.embed(work.ids, model.table)


@torch.no_grad()
def walked(model: Standalone) -> tuple[list[tuple[str, Place]], dict[str, Tensor], Walk]:
    """What a walk stops at, the streams in front of each sublayer, and the walk at its end."""
    work, streams = begin(model)
    walk = model.decoder.walk(streams, work.ids, work.step, model.caches.layers)
    stops, seen = [], dict[str, Tensor]()
    for place in walk:
        stops.append((walk.sublayer.name, place))
        if place is Place.INPUT:
            seen[walk.sublayer.name] = walk.streams.clone()
    return stops, seen, walk


@torch.no_grad()
def stage(model: Standalone, layers: int) -> Tensor:
    """Streams [T, n, d] behind the first ``layers`` layers, by a decoder of these alone."""
    work, streams = begin(model)
    context = model.decoder.context
    decoder = Decoder(replace(context), range(layers))
    return decoder(streams, work.ids, work.step, model.caches.layers[:layers])


def test_it_stops_in_front_of_every_sublayer_and_behind_it(model: Standalone) -> None:
    stops, _, _ = walked(model)
    names = [f"layers.{layer}.{part}" for layer in range(LAYERS) for part in ("attn", "ffn")]
    assert stops == [(name, place) for name in names for place in (Place.INPUT, Place.OUTPUT)]


def test_streams_behind_any_layer_are_there_to_be_captured(model: Standalone) -> None:
    """A draft reads the streams behind given layers, and those that the final collapse reads."""
    _, seen, walk = walked(model)
    for layer in range(1, LAYERS):
        assert torch.equal(seen[f"layers.{layer}.attn"], stage(model, layer)), layer
    assert walk.streams.shape == (len(PROMPT), model.config.hc_mult, model.config.hidden_size)
    work, streams = begin(model)
    with torch.no_grad():
        assert torch.equal(walk.x.require_values(), model.decoder(streams, work.ids, work.step, model.caches.layers))


@pytest.mark.parametrize("part", ["x", "output", "streams"])
def test_what_is_put_in_its_place_is_what_goes_on(part: str, model: Standalone) -> None:
    _, _, plain = walked(model)
    work, streams = begin(model)
    with torch.no_grad():
        walk = model.decoder.walk(streams, work.ids, work.step, model.caches.layers)
        for place in walk:
            here = place is Place.OUTPUT if part == "output" else place is Place.INPUT
            if here and walk.sublayer.name == "layers.1.ffn":
                found: Any = getattr(walk, part)
                setattr(walk, part, replace(found, values=found.values * 1.5) if part == "x" else found * 1.5)
    assert not torch.equal(walk.x.require_values(), plain.x.require_values())


@torch.no_grad()
def test_a_block_of_another_stem_reads_its_own_tensors(model: Standalone) -> None:
    """A draft's block is a layer with a stem of its own; here layer 1 under another name."""
    context, spec = model.decoder.context, model.config.layer(1)
    source: Any = context.source

    class Renamed:
        """The checkpoint, with layer 1 under ``mtp.0``."""

        def __getattr__(self, name: str) -> Any:
            inner = getattr(source, name)
            if not callable(inner):
                return inner

            def call(*given: Any, **more: Any) -> Any:
                return inner(*(_original(each) for each in given), **more)

            return call

    other = Block(replace(context, source=Renamed()), replace(spec, stem="mtp.0"))
    results = []
    for block in (model.decoder.layers[1], other):
        assert isinstance(block, Block)
        work, streams = begin(model)
        walk = Walk(block.sublayers(work.ids, work.step, model.caches.layers[1]), None, streams, work.step)
        results.append(walk.finish().streams)
        assert walk.sublayer.name == f"{block.spec.stem}.ffn"
    assert torch.equal(*results)


def _original(given: Any) -> Any:
    if isinstance(given, str):
        return given.replace("mtp.0.", "layers.1.")
    if isinstance(given, list):
        return [_original(each) for each in given]
    if isinstance(given, tuple):
        return tuple(_original(each) for each in given)
    return given


class SumOfSlot:
    """A site that mixes outputs by adding them, whole or as the parts of a slot."""

    def enter(self, streams: Tensor, step: object, *, gather: Any = None) -> tuple[Activation, None]:
        return Activation(streams[:, 0].clone()), None

    def advance(
        self, output: Any, streams: Tensor, mix: None, step: object, *, gather: Any = None
    ) -> tuple[Activation, Tensor, None]:
        if isinstance(output, Slot):
            output = output.parts[:, : len(streams)].view(torch.bfloat16).float().sum(0)
        streams = self.leave(output, streams, mix)
        return self.enter(streams, step)[0], streams, None

    def leave(self, output: Tensor, streams: Tensor, mix: None, *, gather: Any = None) -> Tensor:
        return streams + output[:, None]


@pytest.mark.parametrize("tokens", [2, 3])
@pytest.mark.parametrize("ends_with_site", [True, False])
def test_a_sum_is_pushed_where_a_site_follows_and_a_kernel_sends(tokens: int, ends_with_site: bool) -> None:
    """Others are reduced: of kernels that store in one place, of passes that do not fit, in front of no site."""
    width, reduced, sent = 4, list[str](), list[str]()
    exchange = lone_exchange(2, width, torch.device("cpu"))
    assert exchange is not None
    exchange = replace(exchange, tokens=2)

    def all_reduce(collective: Collective, part: Tensor) -> Tensor:
        reduced.append(collective.value)
        return part

    def sublayer(collective: Collective, sends: bool) -> Sublayer:
        def run(x: Activation, places: Any) -> Tensor:
            part = x.require_values() + 1
            assert sends or not places
            if places:
                sent.append(collective.value)
                assert [place.shape for place in places] == [part.shape] * 2
                places[0].copy_(part)
                places[1].zero_()
            return part

        return Sublayer(collective.value, site, Form.VALUES, run, collective, sends)

    site: Any = SumOfSlot()
    kinds = [(Collective.ATTENTION_OUTPUT, False), (Collective.EXPERT_OUTPUT, True)] * 2
    streams = torch.ones(tokens, 1, width)
    share = TensorParallel(0, 2, all_reduce, exchange=exchange)
    walk = Walk(
        [sublayer(*kind) for kind in kinds], site if ends_with_site else None, streams, None, EveryToken(share, tokens)
    ).finish()
    assert torch.equal(walk.streams, torch.full_like(streams, 31.0))  # y = 2 x + 1, four times
    attention, experts = (place.value for place in Collective)
    if tokens > 2:
        assert not sent and reduced == [attention, experts] * 2
    else:
        assert sent == [experts] * (2 if ends_with_site else 1)
        assert reduced == [attention, attention] + ([] if ends_with_site else [experts])
