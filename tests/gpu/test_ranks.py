"""Servers of several ranks on several GPUs, beside one rank on one: NCCL, SGLang's all-reduce, CUDA graphs.

For each number of ranks there are four servers. ``tests/serving/test_pair_on_cpu.py`` runs the same checks on CPU
servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import bf16_logprobs, native, pair
from tests.support.gpu_server import FLAGS, SHAPES, outputs
from tests.support.gpus import FOUR_GPUS, TWO_GPUS, one_gpu
from tests.support.pair import PROMPTS, Place, Servers
from tests.support.scored import Scored, Yardstick

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(470)]

NEEDED = {2: TWO_GPUS, 4: FOUR_GPUS}
"""What each number of ranks needs. With four, each rank has 16 heads."""


@pytest.fixture(scope="module", params=[pytest.param(ranks, marks=mark) for ranks, mark in NEEDED.items()])
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def target() -> str:
    (found,) = native.targets()
    return found


@pytest.fixture(scope="module")
def checkpoint(target: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts so wide that each rank's share is 64 or more."""
    shapes = {**SHAPES, "moe_intermediate_size": 64 * max(NEEDED)}
    return native.write_checkpoint(target, tmp_path_factory.mktemp("tiny"), seed=3, **shapes)


@pytest.fixture(scope="module")
def place(ranks: int) -> Place:
    """Four servers share the GPUs: each may take a fifth of their memory, and needs much less."""
    flags = (*FLAGS, "--mem-fraction-static", "0.2")
    return Place(flags, one={"CUDA_VISIBLE_DEVICES": one_gpu()}, ranks=ranks)


@pytest.fixture(scope="module")
def servers(place: Place, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with pair.servers(place, checkpoint, tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture(scope="module")
def yardstick(target: str, checkpoint: Path, servers: Servers) -> Iterator[Yardstick]:
    """Computed while the servers start."""
    mode = native.MODES[target]
    with bf16_logprobs.references(checkpoint, capacity=pair.CAPACITY, mode=mode) as references:
        yield Yardstick(references, PROMPTS)


@pytest.fixture(scope="module")
def alone(servers: Servers, yardstick: Yardstick) -> list[Scored]:
    """By one rank, long prompts in one piece."""
    return pair.scores(servers.one)


def test_several_ranks_agree_with_one(servers: Servers, alone: list[Scored], yardstick: Yardstick):
    pair.check_agreement(alone, pair.scores(servers.several), yardstick)


def test_prefix_cache(servers: Servers, yardstick: Yardstick):
    pair.check_prefix(servers.several, yardstick)


def test_a_broken_share_is_seen(servers: Servers, alone: list[Scored], yardstick: Yardstick):
    pair.check_broken_share_is_seen(alone, pair.scores(servers.broken), yardstick)


def test_graphs_and_eager_decode_give_the_same_bits(servers: Servers):
    servers.several.command("/flush_cache?timeout=30", {})
    with_graphs = outputs(servers.several)
    assert "cuda graph: True" in servers.several.text()
    assert outputs(servers.eager) == with_graphs
    assert "cuda graph: True" not in servers.eager.text()


def test_a_rank_killed_while_it_decodes_ends_the_server(servers: Servers, place: Place):
    pair.check_death(servers.several, 1, place.death_seconds, running=True)


def test_an_idle_rank_killed_ends_the_server(servers: Servers, place: Place):
    pair.check_death(servers.eager, 0, place.death_seconds, running=False)
