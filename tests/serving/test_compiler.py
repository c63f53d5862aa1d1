"""A server's kernels are compiled by a process of its own while weights are loaded: what that process is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

import nvfp4_sgl
from nvfp4_sgl.build import Gpu, Serving
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.common.clusters import Clusters
from nvfp4_sgl.cutedsl_kernels.errors import LibraryError
from nvfp4_sgl.cutedsl_kernels.library import MANIFEST
from nvfp4_sgl.serving import compiler
from nvfp4_sgl.synthetic.tiny import write_tiny
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
        assert compiler.start_compiling(mock.Mock(), "sm_90a", SETTING) is None
    with mock.patch.object(torch.cuda, "is_available", lambda: True), launcher.use(mock.Mock()):
        assert compiler.start_compiling(mock.Mock(), "sm_90a", SETTING) is None
    assert not started.called


def test_kernels_that_no_gpu_will_run_are_said_to_do_nothing(
    started: mock.Mock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    compiler.start_compiling(mock.Mock(), "cpu", SETTING)
    assert not caplog.records
    monkeypatch.setenv(LIBRARY_VARIABLE, "/absent")
    assert compiler.start_compiling(mock.Mock(), "cpu", SETTING) is None
    assert caplog.messages == [f"{LIBRARY_VARIABLE}=/absent: without effect: this server runs on no GPU"]
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
        assert compiler.start_compiling(verified, "sm_90a", SETTING) is started.return_value
    (command,), options = started.call_args
    assert command[:3] == [sys.executable, "-m", "nvfp4_sgl.serving.compiler"]
    assert options["env"]["CUDA_VISIBLE_DEVICES"] == "" and str(Path.cwd()) in options["env"]["PYTHONPATH"]
    built: list[Any] = []
    nice = mock.Mock()
    monkeypatch.setattr(os, "nice", nice)
    monkeypatch.setattr(compiler, "build", lambda *args, gpu, given: built.append((*args, gpu, given)))
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "built"))
    ends, handlers = mock.Mock(), mock.Mock()
    monkeypatch.setattr(compiler, "end_with", ends)
    monkeypatch.setattr(signal, "signal", handlers)
    compiler.main(Path(command[3]), int(command[4]))
    ends.assert_called_once_with(os.getpid(), signal.SIGTERM)
    ((told, target, settings, gpu, given),) = built
    assert (told.config, told.raw, target, settings) == (verified.config, verified.raw, "sm_90a", [SETTING])
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
        assert compiler.start_compiling(mock.sentinel.verified, "sm_90a", SETTING) == "code"


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
        compiler.start_compiling(mock.sentinel.verified, "sm_90a", SETTING)
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
        compiler.start_compiling(mock.sentinel.verified, "sm_90a", SETTING)


SERVER = """
import sys, time
from pathlib import Path
from nvfp4_sgl.build import Serving
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.serving.compiler import run_apart
from nvfp4_sgl.targets.target import descriptor

run_apart(verify(Path(sys.argv[1])), "sm_90a", Serving(1, 512, 2, 64), descriptor("sm_90a").gpu())
print(flush=True)
time.sleep(600)
"""


def test_the_process_and_its_workers_end_with_the_server(tmp_path: Path) -> None:
    """They would hold the lock for which the next server waits; and what is half done is removed."""
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=1)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "user"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(Path(nvfp4_sgl.__file__).parents[1]),
    }
    command = [sys.executable, "-c", SERVER, str(tmp_path / "tiny")]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert server.stdout is not None and server.stdout.readline()
        until(lambda: bool(list(temporary.glob("*/*.claim"))))
        assert len(members(server.pid)) > 3, "the server, its compiler, and workers"
        server.terminate()
        server.wait()
        until(lambda: not members(server.pid), seconds=20)
        assert not [*temporary.glob("*/job"), *temporary.glob("nvfp4-sgl-build-*")]
    finally:
        for process in members(server.pid):
            process.kill()
        server.stdout.close()


def members(session: int) -> list[psutil.Process]:
    """Living processes of a session."""
    return [process for process in psutil.process_iter() if _session(process.pid) == session and _lives(process)]


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_a_process_whose_parent_has_ended_already_ends() -> None:
    """Linux tells only of what happens after it was asked to."""
    code = "import sys; from nvfp4_sgl.targets.fused.parent import end_with; end_with(int(sys.argv[1]))"
    ends = [subprocess.run([sys.executable, "-c", code, str(parent)]).returncode for parent in (os.getpid(), 1 << 30)]
    assert ends == [0, -signal.SIGKILL]
