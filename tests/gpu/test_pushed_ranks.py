"""Servers of several ranks that push parts of sums, against servers whose sums are SGLang's all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4_sgl.pushed_sums import SWITCH
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support import drafted_server
from tests.support.gpu_server import FLAGS, SHAPES, outputs
from tests.support.gpus import TWO_GPUS
from tests.support.server import ServerPool

LAYERS = SHAPES["num_hidden_layers"]
DRAFTS = {"steps3": drafted_server.mtp(3), "dspark": drafted_server.DSPARK}
pytestmark = [pytest.mark.gpu, TWO_GPUS, pytest.mark.server, pytest.mark.timeout(470)]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("stored", "pushed"), [("nvfp4-full", LAYERS * 2), pytest.param("nvfp4-experts", LAYERS, marks=pytest.mark.full)]
)
def test_pushed_sums_give_the_values_of_an_all_reduce(stored: str, pushed: int, serve: ServerPool, tmp_path: Path):
    """With two ranks, whose parts have one order; in graphs, and eagerly. FP8 attention leaves the experts' sums."""
    shapes = {**SHAPES, "moe_intermediate_size": 128}  # a rank's share is 64
    checkpoint, flags = tmp_path / "tiny", (*FLAGS, "--tp-size", "2")
    write_tiny(checkpoint, stored, seed=3, **shapes)
    pushing = serve(checkpoint, *flags)
    assert pushing.info()["rank_sums"].startswith(f"pushed by {pushed} of {2 * LAYERS} sublayers")
    found = outputs(pushing)
    reduced = serve(checkpoint, *flags, environment={SWITCH: "0"})
    assert reduced.info()["rank_sums"] == "by SGLang's all-reduce"
    assert outputs(reduced) == found
    assert outputs(serve(checkpoint, *flags, "--disable-cuda-graph")) == found


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=[*DRAFTS])
def test_rounds_of_drafts(draft: drafted_server.Draft, tmp_path: Path):
    """The target and its draft each push; verify passes, too."""
    with drafted_server.drafted(tmp_path, draft, "--tp-size", "2") as drafted:
        drafted_server.check_graphs(drafted)
        drafted_server.check_guesses(drafted)
        drafted_server.check_crowd(drafted)
