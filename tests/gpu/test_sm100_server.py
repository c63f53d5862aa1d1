"""A server for SM100 on a Hopper GPU, up to its first launch: what a B200 would meet before any kernel of ours runs.

The capability query and both launchers are replaced (``tests/support/sm100_on_hopper``), so SGLang's pools, streams,
graph capture and its own kernels are the GPU's, and nothing of ours is compiled for the wrong chip. What is computed
then has no meaning. ``tests/serving/test_dry_sm100.py`` checks the same with no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4_sgl.build import Serving
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support import dry_server, native
from tests.support.server import Server, ServerPool

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(900)]

CHUNK = 1024
FLAGS = (
    *("--mem-fraction-static", "0.5", "--max-total-tokens", "65536"),
    *("--context-length", "16384", "--max-running-requests", "16", "--cuda-graph-max-bs-decode", "16"),
    *("--chunked-prefill-size", str(CHUNK), "--swa-full-tokens-ratio", "0.5", "--skip-server-warmup"),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if native.targets() != ("sm_90a",):
        pytest.skip("stands in for a Blackwell GPU, which is here: tests/gpu/test_server.py serves on it")
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=3, num_hidden_layers=3, num_attention_heads=64, o_groups=8)
    return path


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"))
    yield pool(checkpoint, *FLAGS, environment={"PYTHONPATH": str(dry_server.PATCHES)})
    pool.close()


def test_target(server: Server):
    dry_server.check_target(server)


def test_weights(server: Server, checkpoint: Path):
    dry_server.check_weights(server, checkpoint)


def test_warm_up(server: Server, checkpoint: Path):
    dry_server.check_warm_up(server, checkpoint, CHUNK)


def test_kernels_are_foreseen(server: Server, checkpoint: Path):
    dry_server.check_foreseen(server, checkpoint, Serving(1, 16384, 16, CHUNK))


def test_first_launches(server: Server, checkpoint: Path):
    dry_server.check_first_launches(server, checkpoint, (7, 100, 900))
