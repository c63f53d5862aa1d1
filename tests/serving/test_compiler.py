"""A server's kernels are compiled by a process of its own while weights are loaded: what that process is told."""

from __future__ import annotations

import os
import subprocess
import sys
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
from nvfp4_sgl.serving import compiler
from nvfp4_sgl.targets.choose import Target

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
    monkeypatch.setattr(compiler, "build", lambda *given, gpu: built.append((*given, gpu)))
    compiler.main(Path(command[3]))
    ((told, target, settings, gpu),) = built
    assert (told.config, told.raw, target, settings) == (verified.config, verified.raw, Target.SM90, [SETTING])
    assert gpu == Gpu(90, 114, CLUSTERS)
    nice.assert_called_once_with(compiler.NICENESS)
    assert not Path(command[3]).exists()
