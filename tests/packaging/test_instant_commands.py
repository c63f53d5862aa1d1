"""Help, argument errors and headers are answered without torch, whose import alone takes seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvfp4_sgl.cli import COMMANDS
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.packaging.checkout import ROOT

HOOK = ROOT / "tests" / "support" / "without_heavy_imports"

ARGUMENT_ERRORS = {
    "tiny": ["OUT", "--format", "none"],
    "inspect": ["DIR", "--threads", "0"],
    "verify": ["DIR", "--max-rms", "-1"],
    "convert": ["DIR", "OUT", "--only", "none"],
    "build": ["DIR", "--target", "none"],
    "layertest": ["DIR"],
    "trace": [],
    "doctor": ["--target", "none"],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny(directory, "nvfp4-full")
    return directory


def nvfp4_sgl(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process where heavy imports fail."""
    return subprocess.run(
        [sys.executable, "-m", "nvfp4_sgl.cli", *arguments],
        env={**os.environ, "PYTHONPATH": f"{HOOK}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_hook_refuses() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env={**os.environ, "PYTHONPATH": str(HOOK)}, capture_output=True
    )
    assert done.returncode == 1 and b"torch is imported" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str) -> None:
    done = nvfp4_sgl(command, "--help")
    assert (done.returncode, done.stderr) == (0, "") and f"usage: nvfp4-sgl {command}" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_argument_errors(command: str) -> None:
    done = nvfp4_sgl(command, *ARGUMENT_ERRORS[command])
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"nvfp4-sgl {command}: error: ")


def test_inspect_of_headers(tiny: Path) -> None:
    for flags in ([], ["--json"]):
        done = nvfp4_sgl("inspect", str(tiny), *flags)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert "nvfp4-full" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layer", "5"], "--layer 5: .* has layers 0 to 4; name one of them"),
        (["--layer", "-1"], "--layer -1: .* has layers 0 to 4"),
        (["--layer", "0", "--target", "sm_90a"], "--target sm_90a: expected a GPU of that kind here, found cpu; run"),
        (["--layer", "0", "--target", "sm_80"], "argument --target: invalid choice: 'sm_80' .*sm_100a"),
        (["--layer", "0", "--target", "cpu", "--prompt", "0"], "--prompt 0 --steps 2: expected at least 1 token"),
    ],
)
def test_layertest_refuses_before_it_imports(
    flags: list[str], message: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = nvfp4_sgl("layertest", str(tiny), *flags)
    assert done.returncode == 2 and re.search(message, done.stderr), done.stderr


def test_inspect_of_no_directory(tmp_path: Path) -> None:
    done = nvfp4_sgl("inspect", str(tmp_path / "nothing"))
    assert done.returncode == 2 and "found nothing" in done.stderr
