"""Drawn requests: whatever is sent, the answer is 200 or a refusal, and the server goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.golden import Golden
from tests.support.posting import post_all
from tests.support.request_generator import draw_requests
from tests.support.server import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(3600)]

DEFAULT_SEEDS, ALL_SEEDS = 4, 40


@pytest.fixture(scope="module")
def server(serve, checkpoint) -> Iterator[Server]:
    """The server, whose answers must be the same after all of this."""
    server: Server = serve(checkpoint)
    before = Golden.ask(server)
    yield server
    before.assert_same(Golden.ask(server))


@pytest.mark.parametrize(
    "seed",
    [*range(DEFAULT_SEEDS), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(DEFAULT_SEEDS, ALL_SEEDS))],
)
def test_drawn_requests(seed: int, server: Server) -> None:
    for answer in post_all(server, draw_requests(seed, 400)):
        assert answer.status == 200 or answer.is_refusal, answer
    assert server.is_ready()


def test_the_same_seed_draws_the_same() -> None:
    assert list(draw_requests(3, 50)) == list(draw_requests(3, 50)) != list(draw_requests(4, 50))
