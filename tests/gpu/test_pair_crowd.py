"""64 requests at once in a small pool of two ranks on two GPUs: aborts, hang-ups and retraction, in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import crowd, native
from tests.support.gpu_server import FLAGS, SHAPES
from tests.support.gpus import TWO_GPUS
from tests.support.server import Server

pytestmark = [pytest.mark.gpu, TWO_GPUS, pytest.mark.server, pytest.mark.timeout(470)]


def test_a_crowd(tmp_path: Path):
    (target,) = native.targets()
    checkpoint = native.write_checkpoint(target, tmp_path / "tiny", seed=3, **SHAPES)
    flags = (*FLAGS, *crowd.FLAGS, "--tp-size", "2")
    with Server.launch(checkpoint, *flags, log=tmp_path / "log", environment=crowd.RETRACTING) as server:
        crowd.check(server.wait_ready(), crowd.ON_GPU)
        assert "cuda graph: True" in server.text()
