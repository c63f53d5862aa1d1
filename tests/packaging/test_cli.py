"""The nvfp4-sgl command: instant help, one-line errors, and a doctor that sees what is wrong."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl import cli, doctor, pushed_sums
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.memory.forecast import INBOXES
from nvfp4_sgl.memory.plan import ServerFlags
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.process_exit import DISABLE_VARIABLE
from nvfp4_sgl.prompt_sizes import SWITCH
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.choose import choose
from tests.support.damage import change_json


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No switch set, and no GPU, whatever this machine has."""
    for name in (DISABLE_VARIABLE, "SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "cpu")


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom nvfp4_sgl import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'torch', 'sglang', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert f"nvfp4-sgl {name}" in capsys.readouterr().out


@pytest.fixture
def fake_command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A subcommand ``fake`` whose ``run`` a test sets."""
    module = types.ModuleType("nvfp4_sgl_fake_command")
    module.add_arguments = lambda parser: parser.add_argument("--status", type=int)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "fake", cli.Command("a fake", module.__name__))
    return module


def test_own_errors_are_one_line_and_exit_2(fake_command: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> int:
        raise CheckpointError("x.safetensors: tensor 'a': expected 1, found 2; download it again")

    fake_command.run = run  # type: ignore[attr-defined]
    assert cli.main(["fake"]) == 2
    expected = "nvfp4-sgl: error: x.safetensors: tensor 'a': expected 1, found 2; download it again\n"
    assert capsys.readouterr() == ("", expected)


def test_defects_keep_their_traceback(fake_command: types.ModuleType) -> None:
    def run(args: argparse.Namespace) -> int:
        raise ZeroDivisionError

    fake_command.run = run  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


def test_status_of_a_subcommand_is_the_exit_status(fake_command: types.ModuleType) -> None:
    fake_command.run = lambda args: args.status  # type: ignore[attr-defined]
    assert cli.main(["fake", "--status", "1"]) == 1
    assert cli.main(["fake"]) == 0


def test_doctor_finds_no_problem_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"sglang               {version('sglang')}" in out
    assert all(where in out for where in choose("cpu").boundaries.names().values())
    assert "MISMATCH" not in out and "PROBLEM" not in out


def test_doctor_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["target"] == "cpu"
    assert report["boundaries"] == choose("cpu").boundaries.names()
    pinned = {pin["name"] for pin in report["pins"]}
    assert pinned == {"sglang", "torch", "triton", "nvidia-cutlass-dsl", "transformers"}
    assert report["activation_modes"] == ["w4a16", "w4a4"]
    assert set(report["kv_row_modes"]) == {"exact", "packed"}
    assert [state["enabled"] for state in report["entry_points"]] == [True, True]
    assert report["problems"] == []


def test_pins_are_compared() -> None:
    installed = version("packaging")
    pins = doctor.compare_pins(
        [f"packaging=={installed}", "pytest==0.0.1", "no-such-distribution==1.0", "numpy>=2", "ruff==0; extra == 'dev'"]
    )
    assert [(pin.name, pin.found is None, pin.ok) for pin in pins] == [
        ("packaging", False, True),
        ("pytest", False, False),
        ("no-such-distribution", True, False),
    ]


def test_a_local_version_label_is_no_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "2.14.1+cu130")
    assert doctor.compare_pins(["torch==2.14.1"])[0].ok
    assert not doctor.compare_pins(["torch==2.14.0"])[0].ok


def test_doctor_reports_a_wrong_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "requires", lambda name: ["sglang==0.5.18"])
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "MISMATCH, expected 0.5.18" in out and "pip install sglang==0.5.18" in out


@pytest.mark.parametrize(
    ("variable", "value"), [(DISABLE_VARIABLE, "1"), ("SGLANG_PLUGINS", "other"), ("SGLANG_PLATFORM", "other")]
)
def test_doctor_sees_the_switches(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    report = doctor.examine()
    assert report.problems and all(variable in problem for problem in report.problems)


def test_doctor_sees_the_switch_of_prompts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It stops a server on a CPU, and any if its value is wrong."""
    monkeypatch.setenv(SWITCH, "1")
    assert any(f"{SWITCH}=1: expected a GPU, found none" in problem for problem in doctor.examine().problems)
    monkeypatch.setenv(SWITCH, "0")
    assert not doctor.examine().problems
    monkeypatch.setenv(SWITCH, "yes")
    assert cli.main(["doctor"]) == 2
    assert f"{SWITCH}: expected 0 or 1, found 'yes'" in capsys.readouterr().err


def test_doctor_sees_the_switch_of_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops a server of another target, and of one rank."""
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=3, num_hidden_layers=1)

    def found(directory: Path | None, **flags: Any) -> list[str]:
        problems = doctor.examine(directory, ServerFlags(**flags)).problems
        return [problem for problem in problems if pushed_sums.SWITCH in problem]

    one, two = ({"target": "sm_90a", "ranks": ranks} for ranks in (1, 2))
    assert not found(None) + found(tmp_path / "tiny", **one)
    monkeypatch.setenv(pushed_sums.SWITCH, "1")
    (problem,) = found(tmp_path / "tiny", target="sm_100a", ranks=2)
    assert "expected a server for sm_90a, found sm_100a" in problem
    (problem,) = found(tmp_path / "tiny", **one)
    assert "expected --tp-size 2, 4 or 8, found 1" in problem
    assert not found(None, target="sm_90a") + found(tmp_path / "tiny", **two)


def test_doctor_says_how_ranks_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words and in JSON; a server that would be refused has no way to sum."""
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=3, num_hidden_layers=1)
    words = ["doctor", str(tmp_path / "tiny"), "--target", "sm_90a", "--tp"]

    def said(ranks: int) -> tuple[int, Any]:
        status = cli.main([*words, str(ranks), "--json"])
        return status, json.loads(capsys.readouterr().out)

    monkeypatch.delenv(pushed_sums.SWITCH, raising=False)
    for ranks, found in {1: "none, with one rank", 2: "pushed in passes of up to 32 tokens, else by"}.items():
        status, report = said(ranks)
        assert status == 0 and report["rank_sums"].startswith(found)
        assert (INBOXES in report["memory"]["server"]) is (ranks == 2)
        cli.main([*words, str(ranks)])
        assert f"sums over ranks: {found}" in capsys.readouterr().out
    monkeypatch.setenv("NVFP4_SGL_TRACE", str(tmp_path / "records"))
    assert said(2)[1]["rank_sums"] == "by SGLang's all-reduce: NVFP4_SGL_TRACE is set"
    monkeypatch.setenv(pushed_sums.SWITCH, "1")
    status, report = said(2)
    assert status == 1 and report["rank_sums"] == "" and len(report["problems"]) == 1
    assert f"{pushed_sums.SWITCH}=1: expected no record of passes" in report["problems"][0]


def test_build_refuses_pushed_sums_of_another_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=3, num_hidden_layers=1)
    monkeypatch.setenv(pushed_sums.SWITCH, "1")
    assert cli.main(["build", str(tmp_path / "tiny"), "--target", "sm_100a", "--tp", "2"]) == 2
    assert "expected a server for sm_90a, found sm_100a" in capsys.readouterr().err
    assert cli.main(["build", str(tmp_path / "tiny"), "--target", "sm_90a", "--tp", "1"]) == 2
    assert "expected --tp 2, 4 or 8, found 1" in capsys.readouterr().err


def test_build_leaves_a_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its kernels would lie between the weights."""
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=3, num_hidden_layers=1)
    before = sorted((tmp_path / "tiny").iterdir())
    words = ["build", str(tmp_path / "tiny"), "--target", "sm_90a", "--output", str(tmp_path / "tiny")]
    assert cli.main(words) == 2
    assert "tiny: expected a folder for kernels, found a checkpoint's; name another" in capsys.readouterr().err
    assert sorted((tmp_path / "tiny").iterdir()) == before


def test_doctor_sees_missing_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    states = doctor.examine().entry_points
    assert [(state.visible, state.enabled) for state in states] == [(False, False), (False, False)]


@pytest.mark.parametrize(
    ("target", "modes", "note"),
    [
        ("sm_90a", ["w4a16", "w4a4"], "matrices that are not NVFP4 are dequantised"),
        ("sm_100a", ["w4a4"], "never yet on a Blackwell GPU"),
    ],
)
def test_doctor_says_what_a_gpu_would_run(
    target: str, modes: list[str], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: target)
    report = doctor.examine()
    assert report.target == target and report.activation_modes == modes
    assert report.boundaries == choose(target).boundaries.names()
    assert note in doctor.render(report) and f"Boundaries on {target} in {modes[0]}" in doctor.render(report)


def test_doctor_says_what_runs_in_the_mode_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "sm_90a")
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=3, num_hidden_layers=1)
    change_json(tmp_path / "tiny" / "config.json", lambda config: config.update(activation_mode="w4a4"))
    report = doctor.examine(tmp_path / "tiny")
    chosen = choose("sm_90a", ActivationMode.W4A4)
    assert report.activation_mode == "w4a4" and report.note == chosen.note
    assert report.boundaries == chosen.boundaries.names()
    assert report.boundaries["experts"].endswith("experts:Experts (hopper_w4a4)")


def test_doctor_summarises_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tiny", str(tmp_path / "tiny"), "--format", "nvfp4-full", "--seed", "3"]) == 0
    capsys.readouterr()
    assert cli.main(["doctor", str(tmp_path / "tiny"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["format"] == "nvfp4-full"
