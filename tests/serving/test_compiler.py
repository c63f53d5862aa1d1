"""A server's kernels are compiled by a process of its own while weights are loaded: what that process is told."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from nvfp4_sgl.build import Gpu, Serving
from nvfp4_sgl.checkpoint.tiny import write_tiny
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.common.clusters import Clusters
from nvfp4_sgl.cutedsl_kernels.errors import LibraryError
from nvfp4_sgl.cutedsl_kernels.library import MANIFEST
from nvfp4_sgl.serving import compiler
from nvfp4_sgl.targets.choose import Target
from nvfp4_sgl.targets.fused.compile_ahead import LIBRARY_VARIABLE, TRITON_FOLDER
from nvfp4_sgl.triton_kernels import ahead

SETTING = Serving(2, 4096, 16, 1024)
CLUSTERS = Clusters(132, 66, 39, 31, 15)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Stands for the process."""
    process = mock.Mock()
    monkeypatch.setattr(subprocess, "Popen", process)
    return process


def test_nothing_starts_without_a_gpu(started: mock.Mock) -> None:
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        assert compiler.start_compiling(mock.Mock(), Target.SM90, SETTING) is None
    with mock.patch.object(torch.cuda, "is_available", lambda: True), launcher.use(mock.Mock()):
        assert compiler.start_compiling(mock.Mock(), Target.SM90, SETTING) is None
    assert not started.called


def test_the_process_builds_for_this_gpu(started: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=1)
    verified = verify(tmp_path / "tiny")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compiler.chip, "processors", lambda device: 114)
    monkeypatch.setattr(launcher.CudaLauncher, "clusters", lambda self, device: CLUSTERS)
    with launcher.use(launcher.CudaLauncher()):
        assert compiler.start_compiling(verified, Target.SM90, SETTING) is started.return_value
    (command,), options = started.call_args
    assert command[:3] == [sys.executable, "-m", "nvfp4_sgl.serving.compiler"]
    assert options["env"]["CUDA_VISIBLE_DEVICES"] == "" and str(Path.cwd()) in options["env"]["PYTHONPATH"]
    built: list[Any] = []
    nice = mock.Mock()
    monkeypatch.setattr(os, "nice", nice)
    monkeypatch.setattr(compiler, "build", lambda *args, gpu, given: built.append((*args, gpu, given)))
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "built"))
    compiler.main(Path(command[3]))
    ((told, target, settings, gpu, given),) = built
    assert (told.config, told.raw, target, settings) == (verified.config, verified.raw, Target.SM90, [SETTING])
    assert gpu == Gpu(90, 114, CLUSTERS) and given == tmp_path / "built"
    nice.assert_called_once_with(compiler.NICENESS)
    assert not Path(command[3]).exists()


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compiler.chip, "processors", lambda device: 132)
    monkeypatch.setattr(launcher.CudaLauncher, "clusters", lambda self, device: CLUSTERS)
    with launcher.use(launcher.CudaLauncher()):
        yield


@pytest.mark.usefixtures("on_hopper")
def test_what_was_built_ahead_is_in_tritons_cache_before_the_process_starts(
    started: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the process compiled it, and the warm-up waited for that."""
    built, cache = tmp_path / "out" / TRITON_FOLDER / "key" / "code", tmp_path / "cache"
    built.parent.mkdir(parents=True)
    built.write_text("code")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "out"))
    started.side_effect = lambda *args, **more: (cache / "key" / "code").read_text()
    with ahead.cached_in(cache):
        assert compiler.start_compiling(mock.sentinel.verified, Target.SM90, SETTING) == "code"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], f"{LIBRARY_VARIABLE}=.*: expected the folder that 'nvfp4-sgl build --output' wrote, found neither"),
        ([MANIFEST], f"expected {MANIFEST} and .*, as the build writes them"),
    ],
)
def test_a_wrong_folder_ends_the_start_before_the_weights_are_loaded(
    files: list[str], message: str, started: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    with pytest.raises(LibraryError, match=message):
        compiler.start_compiling(mock.sentinel.verified, Target.SM90, SETTING)
    assert not started.called


@pytest.mark.usefixtures("on_hopper")
def test_a_triton_cache_that_cannot_be_written_is_named(
    started: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / TRITON_FOLDER / "key").mkdir(parents=True)
    (tmp_path / TRITON_FOLDER / "key" / "code").touch()
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path))
    with (
        ahead.cached_in(Path("/proc/nope")),
        pytest.raises(LibraryError, match="/proc/nope: expected a folder to copy .* let TRITON_CACHE_DIR name one"),
    ):
        compiler.start_compiling(mock.sentinel.verified, Target.SM90, SETTING)
