"""Servers of several ranks that push parts of sums, against servers whose sums are SGLang's all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4_sgl.pushed_sums import SWITCH
from tests.support import native
from tests.support.gpu_server import FLAGS, SHAPES, outputs
from tests.support.gpus import TWO_GPUS
from tests.support.server import ServerPool

pytestmark = [pytest.mark.gpu, TWO_GPUS, pytest.mark.server, pytest.mark.timeout(470)]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (target,) = native.targets()
    shapes = {**SHAPES, "moe_intermediate_size": 128}  # a rank's share is 64
    return native.write_checkpoint(target, tmp_path_factory.mktemp("tiny"), seed=3, **shapes)


def test_pushed_sums_give_the_bits_of_an_all_reduce(serve: ServerPool, checkpoint: Path):
    """With two ranks, whose parts have one order; in graphs, and eagerly."""
    flags = (*FLAGS, "--tp-size", "2")
    pushing = serve(checkpoint, *flags, environment={SWITCH: "1"})
    assert pushing.info()["rank_sums"].startswith("pushed")
    found = outputs(pushing)
    reduced = serve(checkpoint, *flags)
    assert reduced.info()["rank_sums"] == "by SGLang's all-reduce"
    assert outputs(reduced) == found
    assert outputs(serve(checkpoint, *flags, "--disable-cuda-graph", environment={SWITCH: "1"})) == found
