"""A plugin or a checkpoint that fails in any process of a real server ends all of it, with one clear error.

SGLang swallows exceptions of plugins and would go on with its own DeepSeek-V4.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.plugin import EXIT_CODE
from nvfp4_sgl.standalone import Standalone
from tests.serving.test_startup_errors import MATRIX, replace
from tests.support.server import Server

BROKEN = Path(__file__).parents[1] / "support" / "broken_imports"


@pytest.mark.server
@pytest.mark.parametrize(
    ("process", "module"),
    [
        ("launcher", "nvfp4_sgl.serving.platform"),  # loaded by activate()
        ("launcher", "nvfp4_sgl.serving.registration"),  # by register()
        ("scheduler", "nvfp4_sgl.serving.model"),
        ("detokenizer", "nvfp4_sgl.serving.registration"),
    ],
)
def test_broken_plugin(process: str, module: str, tiny_checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(BROKEN), "BROKEN_IMPORT": module, "BROKEN_IN": process}
    with Server.launch(tiny_checkpoints("nvfp4-full"), log=tmp_path / "log", environment=environment) as server:
        code = server.wait_exit()
    assert code != 0, server.text()
    assert f"{module} is broken on purpose" in server.text()
    assert "NVFP4_SGL_DISABLE=1" in server.text()


def nan_at_some_place(scales: torch.Tensor) -> torch.Tensor:
    bytes_ = scales.view(torch.uint8).clone()
    bytes_[5, 1] = 0x7F
    return bytes_.view(torch.float8_e4m3fn)


def negative_at_some_place(scales: torch.Tensor) -> torch.Tensor:
    bytes_ = scales.view(torch.uint8).clone()
    bytes_[5, 1] |= 0x80
    return bytes_.view(torch.float8_e4m3fn)


@pytest.mark.server
@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{MATRIX}.weight_scale", nan_at_some_place),
        (f"{MATRIX}.weight_scale", negative_at_some_place),
        (f"{MATRIX}.weight_scale_2", lambda scale: scale * float("inf")),
    ],
    ids=["NaN block scale", "negative block scale", "infinite global scale"],
)
def test_invalid_value(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], damaged: Path, tmp_path: Path
) -> None:
    """Values are read where the model is loaded, in the scheduler's process; its error ends the launcher too."""
    replace(name, change)(damaged)
    with Server.launch(damaged, log=tmp_path / "log") as server:
        code = server.wait_exit()
    text = server.text()
    assert code != 0, text
    assert name in text
    assert "nvfp4-sgl: error:" in text
    assert "Traceback" not in text, text
    assert f"exit code: {EXIT_CODE}" not in text  # SGLang's own words for it are replaced by ours


def test_nan_global_scale(damaged: Path) -> None:
    """The server loads through the same reader and decoder, and ends at any :class:`CheckpointError` as above."""
    name = f"{MATRIX}.weight_scale_2"
    replace(name, lambda scale: scale * float("nan"))(damaged)
    with pytest.raises(CheckpointError, match=name):
        Standalone(damaged)
