"""The checks of ``tests/gpu/test_ranks.py`` and its neighbours, by servers whose ranks are processes on the CPU.

fp32 activations there, so that agreement is no surprise: what is shown is that the checks run, and see what they must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import bf16_logprobs, crowd, pair
from tests.support.pair import PROMPTS, Place, Servers
from tests.support.scored import Scored, Yardstick
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def place() -> Place:
    return Place(("--max-total-tokens", "16384"), death_seconds=10)


@pytest.fixture(scope="module")
def servers(place: Place, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with pair.servers(place, checkpoint, tmp_path_factory.mktemp("servers")) as found:
        yield found


@pytest.fixture(scope="module")
def yardstick(checkpoint: Path, servers: Servers) -> Iterator[Yardstick]:
    with bf16_logprobs.references(checkpoint, capacity=pair.CAPACITY) as references:
        yield Yardstick(references, PROMPTS)


@pytest.fixture(scope="module")
def alone(servers: Servers, yardstick: Yardstick) -> list[Scored]:
    return pair.scores(servers.one)


def test_two_ranks_agree_with_one(servers: Servers, alone: list[Scored], yardstick: Yardstick) -> None:
    pair.check_agreement(alone, pair.scores(servers.several), yardstick)


def test_prefix_cache(servers: Servers, yardstick: Yardstick) -> None:
    pair.check_prefix(servers.several, yardstick)


def test_a_broken_share_is_seen(servers: Servers, alone: list[Scored], yardstick: Yardstick) -> None:
    pair.check_broken_share_is_seen(alone, pair.scores(servers.broken), yardstick)


def test_a_rank_killed_while_it_decodes_ends_the_server(servers: Servers, place: Place) -> None:
    pair.check_death(servers.several, 1, place.death_seconds, running=True)


def test_an_idle_rank_killed_ends_the_server(servers: Servers, place: Place) -> None:
    pair.check_death(servers.eager, 0, place.death_seconds, running=False)


@pytest.mark.parametrize("environment", [{}, crowd.RETRACTING], ids=["by itself", "as on GPUs"])
def test_a_crowd(serve: Callable[..., Server], checkpoint: Path, environment: dict[str, str]) -> None:
    """Requests are retracted because the pool is full, or because that is asked for."""
    server = serve(checkpoint, *crowd.FLAGS, environment=environment)
    crowd.check(server, crowd.ON_CPU, tolerance=1e-4)
