from __future__ import annotations

from pathlib import Path

import pytest

from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyFormat


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint in every format, all of seed 3."""
    root = tmp_path_factory.mktemp("tiny")
    for format in TinyFormat:
        write_tiny(root / format.value, format, seed=3)
    return {format.value: root / format.value for format in TinyFormat}
