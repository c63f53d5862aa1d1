"""Passes whose tokens ranks divide between sublayers, on the reference target; ``tests/gpu`` has the fused one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.model.layer import Place
from nvfp4_sgl.model.tokens import ALIGNMENT, DividedTokens, EveryToken, tokens_of
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.tracing.taps import observing
from nvfp4_sgl.weights.parallel import SEQUENCE_PARALLEL_TOKENS, TensorParallel
from tests.support.ranks import Exchange

LAYERS = 3
COUNTS = (17, 32, 49, 63, 64, 113, 2)
"""Tokens of a pass. Of four ranks the last has 1, 15, 16 or 17; of the first two and the last of these passes it would
have none, so that every rank keeps all."""


@pytest.fixture(scope="module", params=[2, 4])
def size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(size: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    shapes: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": 2 * size, "o_groups": size}
    write_tiny(path, "nvfp4-full", seed=7, moe_intermediate_size=64 * size, **shapes)
    return path


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def ranks(checkpoint: Path, exchange: Exchange, layers: range | None = None) -> list[Standalone]:
    return [Standalone(checkpoint, parallel=rank, requests=1, capacity=512, layers=layers) for rank in exchange.ranks]


def test_log_probabilities_are_those_of_undivided_tokens(size: int, checkpoint: Path) -> None:
    """But for fp32 rounding: sums and rows are the same, in other matrices."""

    def found(least_tokens: int) -> tuple[list[Tensor], int, int]:
        exchange = Exchange(size, least_tokens)
        models = ranks(checkpoint, exchange)
        passes = [torch.arange(count, 2 * count).tolist() for count in COUNTS]
        logits = exchange.run(lambda rank: torch.cat([models[rank].extend({0: ids})[0] for ids in passes]))
        several = sum(isinstance(tokens_of(exchange.ranks[0], count), DividedTokens) for count in COUNTS)
        return [each.log_softmax(-1) for each in logits], len(exchange.given[0]), several

    whole, sums, none = found(least_tokens=1000)
    divided, collectives, several = found(least_tokens=1)
    assert (none, several) == (0, {2: 6, 4: 4}[size])
    assert sums == 2 * LAYERS * len(COUNTS)
    assert collectives == sums + (2 * LAYERS + 1) * several
    assert all(torch.equal(each, divided[0]) for each in divided)
    assert float((divided[0] - whole[0]).abs().max()) < 1e-4


def test_a_range_of_layers_leaves_all_streams_and_taps_see_them(size: int, checkpoint: Path) -> None:
    ids = list(range(40, 61))

    def found(least_tokens: int) -> list[dict[str, Tensor]]:
        """What taps see, and what is left, of each rank."""
        exchange = Exchange(size, least_tokens)
        models = ranks(checkpoint, exchange, range(2))
        streams = torch.randn(len(ids), 4, models[0].config.hidden_size, generator=torch.Generator().manual_seed(1))
        seen: list[dict[str, Tensor]] = [{} for _ in models]

        def run(rank: int) -> Tensor:
            model = models[rank]
            work = model.begin({0: ids})
            with observing(model.decoder, seen[rank].__setitem__):
                return model.decoder(streams.clone(), work.ids, work.step, model.caches.layers)

        return [values | {"left": left} for values, left in zip(seen, exchange.run(run), strict=True)]

    (whole, *_), divided = found(least_tokens=1000), found(least_tokens=1)
    for name in ("layers.0.hc_ffn.streams", "layers.1.hc_attn.streams", "layers.1.hc_ffn.x", "left"):
        for values in divided:
            assert values[name].shape == whole[name].shape, name
            assert torch.equal(values[name], divided[0][name]), name
            assert float((values[name] - whole[name]).abs().max()) < 1e-4, name


def test_streams_between_layers_are_those_of_all_tokens(size: int, checkpoint: Path) -> None:
    """In front of every sublayer and at the end: what a draft reads."""
    ids = list(range(40, 89))

    def found(least_tokens: int) -> list[Tensor]:
        exchange = Exchange(size, least_tokens)
        models = ranks(checkpoint, exchange)

        def run(rank: int) -> Tensor:
            model = models[rank]
            work = model.begin({0: ids})
            streams = model.decoder.embed(work.ids, model.table)
            walk = model.decoder.walk(streams, work.ids, work.step, model.caches.layers)
            seen = [walk.all_streams().clone() for place in walk if place is Place.INPUT]
            return torch.stack([*seen, walk.all_streams()])

        return exchange.run(run)

    (whole, *_), divided = found(least_tokens=1000), found(least_tokens=1)
    for each in divided:
        assert each.shape == whole.shape == (2 * LAYERS + 1, len(ids), 4, whole.shape[-1])
        assert torch.equal(each, divided[0])
        assert float((each - whole).abs().max()) < 1e-4


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_every_token_is_kept_once_and_all_ranks_but_the_last_are_full(size: int) -> None:
    """So only the last rank's kernels see a number of tokens that is no multiple of 16."""
    several = 0
    for count in (*range(1, 600), *range(SEQUENCE_PARALLEL_TOKENS, SEQUENCE_PARALLEL_TOKENS + 300)):
        kept = [tokens_of(rank, count) for rank in Exchange(size, least_tokens=1).ranks]
        if isinstance(kept[0], EveryToken):
            assert all(isinstance(tokens, EveryToken) and tokens.kept == slice(0, count) for tokens in kept)
            continue
        several += 1
        parts = [tokens.own(torch.arange(count)) for tokens in kept]
        assert torch.equal(torch.cat(parts), torch.arange(count))
        (full,) = {len(part) for part in parts[:-1]}
        assert full % ALIGNMENT == 0 and 0 < len(parts[-1]) <= full
    assert several > 190


def test_who_keeps_every_token() -> None:
    two = Exchange(2).ranks[1]
    assert isinstance(tokens_of(two, SEQUENCE_PARALLEL_TOKENS), DividedTokens)
    for parallel, count in (
        (two, SEQUENCE_PARALLEL_TOKENS - 1),
        (replace(two, sequence=None), 8192),
        (TensorParallel(), 8192),
    ):
        assert isinstance(tokens_of(parallel, count), EveryToken)
