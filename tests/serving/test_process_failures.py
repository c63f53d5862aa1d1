"""A plugin or a checkpoint that fails in any process of a real server ends all of it, with one clear error.

SGLang swallows exceptions of plugins and would go on with its own DeepSeek-V4.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.process_exit import EXIT_CODE
from nvfp4_sgl.standalone import Standalone
from tests.serving.test_startup_errors import MATRIX, replace
from tests.support.damage import file_of
from tests.support.server import Server, wait_for_none
from tests.support.updates import Background, until, update

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
    checkpoint, log = tiny_checkpoints("nvfp4-full"), tmp_path / "log"
    environment, late = {"PYTHONPATH": str(BROKEN)}, {"BROKEN_IMPORT": module, "BROKEN_IN": process}
    fresh = module == "nvfp4_sgl.serving.platform"  # which a process to fork from has loaded with the first of SGLang
    with Server.launch(checkpoint, log=log, environment=environment, late=late, modules=(), fresh=fresh) as server:
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
def test_invalid_value(damaged: Path, tmp_path: Path) -> None:
    """Values are read where the model is loaded, in the scheduler's process; its error ends the launcher too."""
    name = f"{MATRIX}.weight_scale"
    replace(name, nan_at_some_place)(damaged)
    with Server.launch(damaged, log=tmp_path / "log") as server:
        code = server.wait_exit()
    text = server.text()
    assert code != 0, text
    assert name in text
    assert "nvfp4-sgl: error:" in text
    assert "Traceback" not in text, text
    assert f"exit code: {EXIT_CODE}" not in text  # SGLang's own words for it are replaced by ours


@pytest.mark.server
def test_an_update_that_fails_half_way(tiny_checkpoints: Callable[[str], Path], damaged: Path, tmp_path: Path) -> None:
    """The new checkpoint is damaged after its check, while a request of before still runs."""
    name = f"{MATRIX}.weight_scale"
    with Server.launch(tiny_checkpoints("nvfp4-full"), log=tmp_path / "log") as server:
        server.wait_ready()
        running = Background(lambda: server.generate([30, 31], 400))
        until(lambda: server.info()["pools"]["requests"]["used"] > 0)
        updating = Background(lambda: update(server, damaged))
        until(lambda: f"{damaged} verified" in server.text())
        replace(name, nan_at_some_place)(damaged)
        assert running.thread.is_alive(), "the request is too short to see anything"
        assert len(running.wait()["output_ids"]) == 400, "it finishes with the old weights"
        assert server.process.wait(30) != 0 and not wait_for_none(server.process.pid, 10)
        assert updating.wait() is None
    lines = [line for line in server.text().splitlines() if "nvfp4-sgl: error:" in line]
    assert len(lines) == 1 and "failed half-way" in lines[0], server.text()
    assert name in lines[0] and file_of(damaged, name).name in lines[0]
    assert "process scheduler_0 (tensor-parallel rank 0) has ended with exit code 78" in server.text()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{MATRIX}.weight_scale", negative_at_some_place),
        (f"{MATRIX}.weight_scale_2", lambda scale: scale * float("inf")),
        (f"{MATRIX}.weight_scale_2", lambda scale: scale * float("nan")),
    ],
    ids=["negative block scale", "infinite global scale", "NaN global scale"],
)
def test_other_invalid_values(name: str, change: Callable[[torch.Tensor], torch.Tensor], damaged: Path) -> None:
    """The server loads through the same reader and decoder, and ends at any :class:`CheckpointError` as above."""
    replace(name, change)(damaged)
    with pytest.raises(CheckpointError, match=name):
        Standalone(damaged)
