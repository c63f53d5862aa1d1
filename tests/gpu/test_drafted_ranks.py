"""Servers of two ranks that draft on two GPUs; ``test_drafted_server.py`` runs one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import drafted_server
from tests.support.drafted_server import Drafted
from tests.support.gpus import TWO_GPUS

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(470), TWO_GPUS]


DRAFTS = {"steps3": drafted_server.mtp(3), "dspark": drafted_server.DSPARK}


@pytest.fixture(scope="module", params=DRAFTS.values(), ids=[*DRAFTS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafted]:
    with drafted_server.drafted(tmp_path_factory.mktemp("drafted"), request.param, "--tp-size", "2") as found:
        yield found


@pytest.fixture
def drafted(served: Drafted) -> Iterator[Drafted]:
    """Each test ends with the draft's own guesses."""
    yield served
    served.guesses.clear()


def test_rounds_run_in_graphs(drafted: Drafted) -> None:
    drafted_server.check_graphs(drafted)


def test_answers_with_every_kind_of_guess(drafted: Drafted) -> None:
    drafted_server.check_guesses(drafted)


def test_sixteen_requests_at_once(drafted: Drafted) -> None:
    drafted_server.check_crowd(drafted)


def test_sampling(drafted: Drafted) -> None:
    """Ranks agree on what is drawn."""
    drafted_server.check_sampling(drafted)


def test_logits_that_are_not_finite(drafted: Drafted) -> None:
    drafted_server.check_nan(drafted)


def test_the_time_of_a_round(drafted: Drafted) -> None:
    drafted_server.print_round(drafted)
