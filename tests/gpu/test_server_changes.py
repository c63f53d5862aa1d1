"""A server with CUDA graphs gets new weights in place, and a request whose logits are NaN.

``tests/serving`` tests both on CPU servers, where nothing is captured: there graphs hold no addresses of weights.
"""

from __future__ import annotations

import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import native
from tests.support.bf16_logprobs import generate, prompt
from tests.support.gpu_server import FLAGS, SHAPES, outputs
from tests.support.logprobs import flush
from tests.support.server import ServerPool
from tests.support.updates import update

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(900)]

FAULTS = Path(__file__).parents[1] / "support" / "planted_faults"
MARK = 20
"""The last token of prompts that must fail, and of no other: ``prompt`` draws from 25 on."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two that differ in values alone."""
    (target,) = native.targets()
    old, new = (
        native.write_checkpoint(target, tmp_path_factory.mktemp("tiny"), seed=seed, **SHAPES) for seed in (3, 4)
    )
    return old, new


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


def test_new_weights_under_graphs(serve: ServerPool, checkpoints: tuple[Path, Path]) -> None:
    """Bit for bit those of a server that was started with them, though the graphs were captured with the old ones."""
    old, new = checkpoints
    expected = outputs(serve(new, *FLAGS))
    server = serve(old, *FLAGS)
    assert outputs(server) != expected
    status, message = update(server, new, weight_version="second")
    assert status == 200, message
    assert outputs(server) == expected
    assert "cuda graph: True" in server.text()
    assert server.get("/model_info")["weight_version"] == "second"


def test_nan_logits(serve: ServerPool, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """The request fails with status 500; its neighbours' answers and those that follow keep their bits."""
    plant = tmp_path / "token"
    environment = {"PYTHONPATH": str(FAULTS), "PLANTED_FAULT": "nan logits", "PLANTED_NAN": str(plant)}
    server = serve(checkpoints[0], *FLAGS, environment=environment)
    expected = outputs(server)
    plant.write_text(str(MARK))
    bad = [*prompt(300, seed=8), MARK]

    def fails(_: int) -> None:
        with pytest.raises(urllib.error.HTTPError) as refusal:
            generate(server, bad)
        assert refusal.value.code == 500

    def answers(seed: int) -> Any:
        return generate(server, prompt(300, seed=seed))["meta_info"]["completion_tokens"]

    with ThreadPoolExecutor(4) as threads:
        failed, well = threads.map(fails, range(2)), threads.map(answers, (11, 12))
        assert list(failed) == [None, None] and all(well)
    plant.unlink()
    flush(server)  # cached prefixes change the shapes of products, and with them bits
    assert outputs(server) == expected
