"""More requests at once than a pool holds: they wait, are given up, are retracted and go on, and leave nothing."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.support.given_up import Plan, check_nothing_is_left
from tests.support.gpu_server import alone
from tests.support.prompts import draw_ids
from tests.support.server import Server

CONCURRENCY, REQUESTS = 64, 256
FLAGS = (
    *("--max-running-requests", str(CONCURRENCY), "--cuda-graph-max-bs-decode", str(CONCURRENCY)),
    *("--max-total-tokens", "16384", "--context-length", "4096", "--swa-full-tokens-ratio", "1.0"),
    *("--schedule-conservativeness", "0.05"),
)
"""A page of 256 tokens for each of 64 requests, whose answers need a second; the scheduler hopes that they will not."""


@dataclass(frozen=True)
class Pace:
    """How long requests are, by how fast a server is: with few tokens at a time in use nothing is ever retracted.

    Attributes:
        tokens: of answers, up to twice as many of those that are given up. patience: seconds until they are, at most.
    """

    tokens: int
    patience: float


ON_GPU, ON_CPU = Pace(600, 1.5), Pace(160, 4.0)

RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
"""Environment of servers on GPUs: SGLang retracts a request every 20 steps. By themselves they retracted none, with 600
tokens (two H200s) or 1600 (an H100); why not is not known."""


def draw(number: int, rng: random.Random, pace: Pace) -> Plan:
    """A request whose prompt fits a page, and which with its answer does not; half of them are given up."""
    end = rng.choice(["finish", "finish", "hang up", "abort"])
    patience = rng.uniform(0, pace.patience)
    tokens = rng.randint(pace.tokens // 2, pace.tokens) * (1 if end == "finish" else 2)
    extra: dict[str, Any] = rng.choice([{}, {}, {}, {"n": 2}])
    return Plan(f"crowd-{number}", draw_ids(rng.randint(150, 250), 5000 + number, 512), tokens, end, patience, extra)


def retractions(log: str) -> int:
    """Requests that a server's log says it has retracted."""
    found = re.findall(r"(?:Retract requests|Testing retraction)\. #retracted_reqs: (\d+)", log)
    return sum(map(int, found))


def check(server: Server, pace: Pace, tolerance: float = 0.0) -> None:
    """Every request ends as planned, some having been retracted; the answers of before are those of after.

    Those are of requests alone, of which none is retracted.
    """
    before = alone(server)
    rng = random.Random(11)
    plans = [draw(number, rng, pace) for number in range(REQUESTS)]
    with ThreadPoolExecutor(CONCURRENCY) as threads:
        outcomes = list(threads.map(lambda plan: plan.run(server), plans))
    retracted = retractions(server.text())
    print(f"{outcomes.count('complete')} complete, {outcomes.count('given up')} given up, {retracted} retracted")
    assert outcomes.count("complete") >= sum(plan.end == "finish" for plan in plans)
    assert outcomes.count("given up") >= REQUESTS // 8
    assert retracted > 0
    check_nothing_is_left(server)
    check_alike(before, alone(server), tolerance)


def check_alike(before: list[Any], after: list[Any], tolerance: float) -> None:
    """Tokens are the same, and their log-probabilities within ``tolerance``."""
    assert [[token for _, token, _ in answer] for answer in after] == [
        [token for _, token, _ in answer] for answer in before
    ]
    differences = [
        abs(one - other)
        for answer, same in zip(before, after, strict=True)
        for (one, _, _), (other, _, _) in zip(answer, same, strict=True)
    ]
    print(f"probe: log-probabilities within {max(differences):.1e}")
    assert max(differences) <= tolerance
