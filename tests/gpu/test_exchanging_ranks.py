"""Sums over two GPUs inside mHC sites, bit for bit, eagerly and in graphs, with ranks that come late."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gpus import TWO_GPUS

pytestmark = [pytest.mark.gpu, TWO_GPUS]
RANKS = 2
SECONDS = 300


def test_two_gpus_sum_inside_sites(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    logs = [tmp_path / f"{rank}.log" for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.exchanging_ranks", str(rank), str(RANKS), address, "--time"],
            cwd=root, env=environment, stdout=log.open("wb"), stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        codes = [rank.wait(SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = "\n".join(log.read_text() for log in logs)
    print(said)
    assert codes == [0] * RANKS, said
