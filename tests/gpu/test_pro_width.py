"""Pro's true width on one GPU: eight ranks against one, by log-probabilities.

Four layers, which are of every kind that Pro has, and 16 experts of random weights that no file holds; all else is
Pro's. Ranks take turns on the GPU. The yardstick is one rank whose roundings fall elsewhere; a rank that adds nothing
to one kind of sum must exceed its bounds. Without a GPU it runs in small, under Triton's
interpreter, with ``--full``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import BASE
from nvfp4_sgl.weights.parallel import Collective, TensorParallel
from tests.support import native
from tests.support.interpreted import ON_GPU
from tests.support.ranks import Exchange
from tests.support.released import PRO, config_json
from tests.support.rounding_noise import distances, excess, nudged

pytestmark = [] if ON_GPU else [pytest.mark.full]

RANKS = 8 if ON_GPU else 2
LAYERS = 4
RATIOS = [*PRO["compress_ratios"][:LAYERS], 0]
"""HCA, HCA, CSA, HCA; the first three are routed by token ids."""
SMALL: dict[str, Any] = {**BASE, "n_routed_experts": 6, "num_hash_layers": PRO["num_hash_layers"]}
CONFIG: dict[str, Any] = (config_json(PRO, n_routed_experts=16) if ON_GPU else SMALL) | {
    "num_hidden_layers": LAYERS,
    "compress_ratios": RATIOS,
}
PROMPT, DECODED = (150, 4) if ON_GPU else (9, 1)
"""Tokens of a prompt, and decode steps. Ratio-4 windows close in both; on a GPU a ratio-128 window, too."""
MEDIAN, NINETIETH = 2.0, 3.0
"""Bounds of the distance of several ranks by the yardstick's: sums of bf16 parts are rounded once more."""


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    found = native.targets()[0]
    with native.gemms(found):
        yield found


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Verified:
    folder: Path = tmp_path_factory.mktemp("pro")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return verify_dummy(folder)


def load(verified: Verified, target: str, parallel: TensorParallel | None = None) -> Standalone:
    device = "cuda" if ON_GPU else "cpu"
    return Standalone(verified, target=target, device=device, requests=1, capacity=256, parallel=parallel)


@torch.no_grad()
def log_probabilities(model: Standalone) -> Tensor:
    """fp32 [prompt and decode steps, vocabulary]."""
    model.reset()
    ids = torch.randint(3, CONFIG["vocab_size"], (PROMPT + DECODED,), generator=torch.Generator().manual_seed(5))
    passes = [ids[:PROMPT], *ids[PROMPT:].split(1)]
    return torch.cat([model.extend({0: part.tolist()})[0] for part in passes]).log_softmax(-1)


@pytest.fixture(scope="module")
def one(verified: Verified, target: str) -> Standalone:
    return load(verified, target)


@pytest.fixture(scope="module")
def expected(one: Standalone) -> Tensor:
    return log_probabilities(one)


@pytest.fixture(scope="module")
def yardstick(one: Standalone, expected: Tensor) -> list[Tensor]:
    """Distances of the same rank with a few roundings of its embedding moved, one a run."""
    table, found = one.table, []
    for seed in (1, 2, 3):
        one.table = nudged(table, seed)
        found.append(distances(log_probabilities(one), expected))
    one.table = table
    return found


def several(verified: Verified, target: str, change: Callable[[TensorParallel], TensorParallel]) -> list[Tensor]:
    """Log-probabilities of each of :data:`RANKS` ranks, whose collectives ``change`` may replace."""
    exchange = Exchange(RANKS)
    models = [load(verified, target, change(parallel)) for parallel in exchange.ranks]
    return exchange.run(lambda rank: log_probabilities(models[rank]))


def agrees(found: Tensor, expected: Tensor, yardstick: list[Tensor]) -> bool:
    median, ninetieth = excess(distances(found, expected), yardstick)
    print(f"several ranks by the yardstick's: median {median:.2f}, 90 % {ninetieth:.2f}")
    return median <= MEDIAN and ninetieth <= NINETIETH


def test_layers_are_of_every_kind(verified: Verified) -> None:
    config = verified.config
    assert {*config.layer_kinds} == {LayerKind.CSA, LayerKind.HCA}
    assert [config.is_hash_routed(layer) for layer in range(LAYERS)] == [True, True, True, False]


def test_ranks_agree_with_one(verified: Verified, target: str, expected: Tensor, yardstick: list[Tensor]) -> None:
    found = several(verified, target, lambda parallel: parallel)
    assert all(torch.equal(each, found[0]) for each in found)
    assert agrees(found[0], expected, yardstick)


@pytest.mark.parametrize("lost", [Collective.ATTENTION_OUTPUT, Collective.EXPERT_OUTPUT], ids=lambda one: one.name)
def test_a_share_that_is_lost_is_seen(
    lost: Collective, verified: Verified, target: str, expected: Tensor, yardstick: list[Tensor]
) -> None:
    def losing(parallel: TensorParallel) -> TensorParallel:
        def reduce(collective: Collective, part: Tensor) -> Tensor:
            is_lost = collective is lost and parallel.rank == RANKS - 1
            return parallel.all_reduce(collective, torch.zeros_like(part) if is_lost else part)

        return replace(parallel, all_reduce=reduce)

    assert not agrees(several(verified, target, losing)[0], expected, yardstick)
