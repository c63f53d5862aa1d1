"""What scripts of launch answer at once; how they and ``nvfp4-sgl`` end on Ctrl-C and write to ASCII terminals."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from nvfp4_sgl.cli import COMMANDS
from tests.packaging.checkout import ROOT

SCRIPTS = sorted(
    file.name for file in (ROOT / "launch").iterdir() if file.is_file() and file.read_text().startswith("#!")
)
GPU = sorted(name for name in SCRIPTS if "require_gpu" in (ROOT / "launch" / name).read_text())
PLACES = {"bench_load": ["DIR"], "soak": ["--gpu", "0"]}
"""Arguments without which a script is not called."""
ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}


def fresh(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine where nothing was built: building would leave files in ``tmp_path``."""
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path), "NVFP4_SGL_PYTHON": "/nonexistent"}


def run(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script with arguments, on a machine where nothing was built."""
    command: list[str | Path] = [ROOT / "launch" / words[0], *words[1:]]
    return subprocess.run(command, env=fresh(folder) | variables, capture_output=True, text=True, timeout=20)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_builds_nothing(name: str, tmp_path: Path) -> None:
    for variables in ({}, ASCII):
        command: list[str | Path] = [ROOT / "launch" / name, "--help"]
        done = subprocess.run(command, env=fresh(tmp_path) | variables, capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.splitlines()) > 3
        assert "SUPPRESS" not in done.stdout and "environment-seconds" not in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["bench_full", "-h"], ["bench_full", "ours", "--tp", "2", "--help"]])
def test_help_lists_the_program_s_options(words: list[str], tmp_path: Path) -> None:
    """Wherever it is asked for, and the options that are shared, too."""
    done = run(words, tmp_path)
    assert all(option in done.stdout for option in ("  --tp N ", "  --layers ", "  --trace ", "logs and results"))


def test_help_of_a_step_needs_no_gpu(tmp_path: Path) -> None:
    done = run(["check_gpu", "kernels", "--help"], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (0, "") and "  --again " in done.stdout


def test_help_behind_two_dashes_is_another_tool_s(tmp_path: Path) -> None:
    """launch/bench_convert hands it on; here nothing can be built for that."""
    done = run(["bench_convert", "DIR", "--", "--help"], tmp_path)
    assert done.returncode and "Measures time and memory" not in done.stdout


@pytest.mark.parametrize("name", GPU)
def test_wrong_options_are_told_before_a_gpu_is_looked_for(name: str, tmp_path: Path) -> None:
    done = run([name, *PLACES.get(name, []), "--no-such-option"], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and not done.stdout and not list(tmp_path.iterdir())
    assert done.stderr.endswith(f"launch/{name}: error: unrecognized arguments: --no-such-option\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench_hopper", "--tp", "two"], "argument --tp: invalid int value: 'two'"),
        (["bench_hopper", "--models", "lite"], "argument --models: invalid choice: 'lite'"),
        (["bench_kernels", "--output"], "argument --output: expected one argument"),
        (["bench_load"], "the following arguments are required: DIR"),
        (["demo", "--target", "sm_90a"], "argument --target: invalid choice: 'sm_90a'"),
        (["demo", "--form", "bf16"], "unrecognized arguments: --form bf16"),
    ],
)
def test_wrong_values_are_told_before_anything_is_built(words: list[str], said: str, tmp_path: Path) -> None:
    done = run(words, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and f"launch/{words[0]}: error: {said}" in done.stderr
    assert not done.stdout and not list(tmp_path.iterdir())


def test_what_measures_gpus_asks_for_one() -> None:
    assert {"bench_full", "bench_kernels", "bench_long", "profile_decoder", "check_gpu", "check_sm90"} <= {*GPU}


@pytest.mark.parametrize("name", GPU)
def test_without_a_gpu_nothing_is_built(name: str, tmp_path: Path) -> None:
    done = run([name, *PLACES.get(name, [])], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.splitlines() == [
        f"launch/{name}: needs an NVIDIA GPU, and CUDA_VISIBLE_DEVICES hides all; unset it"
    ]
    assert not list(tmp_path.iterdir())


WAITS = """
import subprocess, sys, time
sys.path.insert(0, {root!r})
from nvfp4_sgl.terminal import guarded

def main():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(300)

sys.exit(guarded("waits", main))
"""


def interrupt(command: list[str | Path], environment: dict[str, str], ready: str) -> tuple[int, str, str]:
    """(status, stdout, stderr) of a command that gets what a terminal sends on Ctrl-C once it has printed ``ready``."""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell that started the tests in the background has the signal ignored, and children inherit that.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.readline()
        assert ready in first
        os.killpg(process.pid, signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
        return process.returncode, first + rest, errors


def test_ctrl_c_leaves_one_line_and_no_children() -> None:
    """Children in sessions of their own get no signal from the terminal."""
    status, printed, errors = interrupt([sys.executable, "-c", WAITS.format(root=str(ROOT))], dict(os.environ), "")
    assert (status, errors) == (130, "\nwaits: interrupted\n")
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(printed)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(printed)}").exists()


STALLS = """
import sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            print("waiting", flush=True)
            time.sleep(300)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("name", ["nvfp4_sgl.cli", "argparse", "nvfp4_sgl.checkpoint.verified"])
def test_ctrl_c_while_the_command_imports(name: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STALLS.format(name=name))
    code = "import sys; from nvfp4_sgl.entry import main; sys.exit(main())"
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    status, _, errors = interrupt([sys.executable, "-c", code, "inspect", "DIR"], variables, "waiting")
    assert (status, errors) == (130, "\nnvfp4-sgl: interrupted\n")


@pytest.mark.parametrize("name", ["runpy", "nvfp4_sgl.terminal"])
def test_ctrl_c_while_a_program_of_launch_is_looked_up(name: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(STALLS.format(name=name))
    command: list[str | Path] = [
        sys.executable,
        ROOT / "launch/programs/run.py",
        "launch/programs/release.py",
        "--check",
    ]
    status, _, errors = interrupt(command, os.environ | {"PYTHONPATH": str(tmp_path)}, "waiting")
    assert (status, errors) == (130, "\nlaunch/release: interrupted\n")


def test_an_error_of_the_package_is_one_line_in_a_program_of_launch(tmp_path: Path) -> None:
    command: list[str | Path] = [
        sys.executable,
        ROOT / "launch/programs/run.py",
        "launch/programs/measure_small.py",
        tmp_path / "nothing",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"launch/measure_small: error: {tmp_path / 'nothing'}: expected a directory")


def test_the_script_of_the_command_begins_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"nvfp4-sgl": "nvfp4_sgl.entry:main"}


def test_ctrl_c_in_a_program_of_launch(tmp_path: Path) -> None:
    """The stand-in for an interpreter is the real one, with a program that waits."""
    (tmp_path / "sitecustomize.py").write_text(STALLS.format(name="torch"))
    variables = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    status, _, errors = interrupt([ROOT / "launch" / "train_small", "--output", tmp_path], variables, "waiting")
    assert (status, errors) == (130, "\nlaunch/train_small: interrupted\n")


def test_ctrl_c_in_a_script() -> None:
    code = f'BASH_SOURCE_IS=launch; source "{ROOT}/launch/shell.sh"; echo ready; sleep 300'
    status, _, errors = interrupt(["bash", "-c", code], dict(os.environ), "ready")
    assert status == 130 and "interrupted" in errors and len(errors.splitlines()) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_write_to_ascii_terminals(command: str) -> None:
    """Names outside ASCII come from the command line; help may hold the field's notation."""
    for arguments in ([command, "--help"], [command, "é", "ü"]):
        done = subprocess.run(
            [sys.executable, "-m", "nvfp4_sgl.cli", *arguments], env=os.environ | ASCII, cwd=ROOT, capture_output=True
        )
        assert b"Traceback" not in done.stderr, done.stderr
        assert (done.stdout + done.stderr).isascii()
