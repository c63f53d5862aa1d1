"""Sums over two GPUs in mHC sites, eagerly and in graphs, with ranks that come late; the time of a site."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import inbox_ranks
from tests.support.gpus import TWO_GPUS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200), TWO_GPUS]


def test_two_gpus_send_and_receive(tmp_path: Path) -> None:
    said = inbox_ranks.run(2, tmp_path, 150, "--time")
    assert said.count("us a site") == 2 * len(inbox_ranks.GPU.tokens)
