"""Help, argument errors and headers are answered without torch, whose import alone takes seconds."""

from __future__ import annotations

import json
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


@pytest.fixture(scope="module")
def narrow(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json alone, of experts that are no whole blocks of a kernel."""
    directory = tmp_path_factory.mktemp("narrow")
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8")) | {"moe_intermediate_size": 96}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trace", "DIR", "--target", "sm_90a"], "--target sm_90a: expected a GPU of that kind here, found cpu"),
        (["trace", "DIR", "--prompt", "0"], "--prompt 0 --steps 2: expected at least 1 token"),
        (["trace", "DIR", "--steps", "2000000"], "--prompt 64 --steps 2000000: expected at most 1048576 tokens"),
        (["trace", "nowhere", "DIR"], "nowhere: expected a record, a folder of records or a checkpoint"),
        (["tiny", "DIR"], ": not empty; name an empty directory, or pass --force"),
        (["tiny", "OUT", "--set", "hidden_size=7"], "hidden_size"),
        (["tiny", "OUT", "--set", "no_such_field=7"], "no_such_field"),
        (["convert", "nowhere", "OUT"], "nowhere: expected a directory"),
        (["convert", "DIR", "DIR"], ": expected a directory apart from the source"),
        (["convert", "DIR", "OUT", "--device", "tpu"], "--device tpu: expected cpu, cuda or cuda:N"),
        (["convert", "DIR", "OUT", "--device", "cuda:1"], "--device cuda:1: no such GPU here"),
        (["convert", "DIR", "launch"], "launch: not empty, and no unfinished conversion"),
        (["build", "DIR"], "--target: expected one, since this machine has no GPU"),
        (["build", "nowhere", "--target", "sm_100a"], "nowhere: expected a directory"),
        (["build", "DIR", "--target", "sm_100a", "--mode", "w4a16"], "w4a16"),
        (["build", "DIR", "--target", "sm_100a", "--tp", "1", "3"], "--tp 3: o_groups is 2, expected a multiple of 3"),
        (["build", "DIR", "--target", "sm_90a", "--tp", "4"], "--tp 4: o_groups is 2, expected a multiple of 4"),
        (["build", "NARROW", "--target", "sm_100a"], "target sm_100a, --tp 1: "),
        (["verify", "nowhere"], "nowhere: expected a directory"),
        (["verify", "DIR", "--against", "nowhere"], "nowhere: expected a directory"),
        (["doctor", "nowhere"], "nowhere: expected a directory"),
        (["doctor", "--tp", "2"], "--tp: expected DIR, too"),
        (["doctor", "--context-length", "9", "--kv-cache-dtype", "auto"], "error: --context-length: expected DIR, too"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_before_anything_is_imported(
    words: list[str], message: str, tiny: Path, narrow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    places = {"DIR": str(tiny), "OUT": str(tmp_path / "out"), "launch": str(ROOT / "launch"), "NARROW": str(narrow)}
    done = nvfp4_sgl(*(places.get(word, word) for word in words))
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_inspect_of_no_directory(tmp_path: Path) -> None:
    done = nvfp4_sgl("inspect", str(tmp_path / "nothing"))
    assert done.returncode == 2 and "found nothing" in done.stderr
