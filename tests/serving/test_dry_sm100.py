"""A server for SM100 up to its first launch, with no GPU: the same checks as on a Hopper GPU, in CI.

SGLang serves as on a CPU, from pools on the CPU; the package takes the machine for one with a B200. Pre-flight, choice
of the target, loading and the whole warm-up are the package's own, unchanged (``tests/gpu/test_sm100_server.py``).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nvfp4_sgl.build import Serving
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support import dry_server
from tests.support.server import Server, ServerPool

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

CHUNK = 256
FLAGS = (
    *("--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3", "--skip-server-warmup"),
    *("--max-total-tokens", "2048", "--max-running-requests", "3", "--context-length", "1024"),
    *("--chunked-prefill-size", str(CHUNK)),
)
ENVIRONMENT = {"PYTHONPATH": str(dry_server.PATCHES), "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=3, num_hidden_layers=3)
    return path


@pytest.fixture
def server(serve: ServerPool, checkpoint: Path) -> Server:
    return serve(checkpoint, *FLAGS, environment=ENVIRONMENT)


def test_target(server: Server):
    dry_server.check_target(server)


def test_weights(server: Server, checkpoint: Path):
    dry_server.check_weights(server, checkpoint)


def test_warm_up(server: Server, checkpoint: Path):
    dry_server.check_warm_up(server, checkpoint, CHUNK)


def test_kernels_are_foreseen(server: Server, checkpoint: Path):
    dry_server.check_foreseen(server, checkpoint, Serving(1, 1024, 3, CHUNK))


def test_first_launches(server: Server, checkpoint: Path):
    dry_server.check_first_launches(server, checkpoint, (7, 100, 200, CHUNK - 1))
