"""The checks of ``tests/gpu/test_pro_ranks.py`` by servers whose ranks are processes on the CPU, in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from tests.support import dummy_ranks
from tests.support.dummy_ranks import Place
from tests.support.released import PRO

pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.timeout(1200)]


def test_two_ranks_agree_with_one(tmp_path: Path) -> None:
    ratios = [*PRO["compress_ratios"][:4], 0]
    fields = {"num_hidden_layers": 4, "compress_ratios": ratios, "num_hash_layers": PRO["num_hash_layers"]}
    folder = tmp_path / "model"
    folder.mkdir()
    model = dummy_ranks.write_config(folder, tiny_config(TinyFormat.NVFP4_FULL, fields))
    with dummy_ranks.servers(Place(("--max-total-tokens", "16384"), ranks=2), model, tmp_path) as found:
        dummy_ranks.check(found)
