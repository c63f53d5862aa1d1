"""One thing has one name in all subcommands; what prints a report prints it as JSON, too, with documented fields."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl import cli
from nvfp4_sgl.arguments import named_here, print_json
from nvfp4_sgl.checkpoint.drafts import DraftKind
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.packaging.checkout import ROOT

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "n_routed_experts": 6}
SHARED = ("--target", "--mode", "--tp", "--prompt", "--steps", "--seed", "--threads", "--json")
PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
ELSEWHERE = ("inspect", "verify")
"""Commands whose fields docs/formats.md has; tests/checkpoint/test_json_fields.py holds them against it."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("words") / "tiny"
    write_tiny(directory, "nvfp4-full", seed=4, **SIZES)
    return directory


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "cpu")


def arguments(command: str) -> list[argparse.Action]:
    (chosen,) = (a for a in cli.build_parser(command)._actions if isinstance(a, argparse._SubParsersAction))
    return list(chosen.choices[command]._actions)


@pytest.mark.parametrize("option", SHARED)
def test_an_option_is_the_same_thing_wherever_it_is(option: str) -> None:
    """But for its default, and what it is the seed of."""
    found = [a for name in cli.COMMANDS for a in arguments(name) if option in a.option_strings]
    assert found
    assert len({(a.dest, a.metavar, tuple(a.option_strings)) for a in found}) == 1
    words = {re.split(r" of | \(|;|s a server|, a server", a.help or "")[0].removesuffix("s") for a in found}
    assert len(words) == 1, words


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name != "trace"])
def test_a_checkpoint_is_dir_and_what_is_written_is_out(command: str) -> None:
    places = {a.dest: a.metavar for a in arguments(command) if not a.option_strings}
    assert places.items() <= {"directory": "DIR", "output": "OUT"}.items()
    assert places["output" if command == "tiny" else "directory"]


@pytest.mark.parametrize("command", ["build", "doctor"])
@pytest.mark.parametrize("name", ["--tp-size", "--tensor-parallel-size"])
def test_another_name_of_an_option_is_answered_with_the_one_here(
    command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "DIR", name, "2"])
    assert end.value.code == 2 and f"{name}: this option is --tp here" in capsys.readouterr().err


def test_errors_name_the_option_that_the_command_takes(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code that servers run, too, speaks of their flag."""
    assert cli.main(["build", str(tiny), "--target", "sm_100a", "--tp", "3"]) == 2
    said = capsys.readouterr().err
    assert "--tp 3: " in said and "use a smaller --tp" in said and "--tp-size" not in said
    assert named_here("--tp-size 2, --tp-sizes, --tensor-parallel-size=4") == "--tp 2, --tp-sizes, --tp=4"


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["inspect", "DIR", "--thr", "2"])
    assert "unrecognized arguments: --thr" in capsys.readouterr().err


@pytest.mark.parametrize("found", ["nan", "inf", "-1", "x"])
def test_a_bound_from_which_nothing_departs_is_refused(found: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["layertest", "DIR", "--layer", "0", f"--bound={found}"])
    assert end.value.code == 2
    assert f"--bound: expected a finite number of at least 0, found '{found}'" in capsys.readouterr().err


@pytest.mark.parametrize("found", [str(2**63), "-1", "9" * 5000])
def test_a_seed_that_no_generator_takes_is_refused(found: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["layertest", "DIR", "--layer", "0", f"--seed={found}"])
    assert end.value.code == 2 and "--seed: expected a whole number from 0 to" in capsys.readouterr().err


def test_numbers_that_json_has_not_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"stages": [{"median": float("nan"), "bad": 3}], "bound": float("inf"), "pair": (1.5, -float("inf"))})
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"stages": [{"median": None, "bad": 3}], "bound": None, "pair": [1.5, None]}


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream_is_no_traceback(closed: str) -> None:
    """``>&-`` closes it, and Python has None in its place."""
    command = f'"{sys.executable}" -m nvfp4_sgl.cli inspect nothing {closed}>&-'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def documented(command: str) -> set[str]:
    """Names of a command's fields."""
    (row,) = re.findall(rf"^\| `{command}` \| (`.*`) \|$", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", row))


def report(command: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments with which ``command`` prints a report."""
    if command == "build":
        monkeypatch.setattr("nvfp4_sgl.build.build", lambda *_: (3, 4))
        return [str(tiny), "--target", "sm_100a"]
    more: dict[str, list[str]] = {
        "tiny": [str(tmp_path / "new"), *(f"--set={name}={value}" for name, value in SIZES.items())],
        "convert": [str(tiny), str(tmp_path / "out"), "--dry-run"],
        "layertest": [str(tiny), "--layer", "1", "--prompt", "4", "--steps", "1"],
        "trace": [str(tiny), "--prompt", "4", "--steps", "1"],
    }
    return more.get(command, [str(tiny)])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_report_is_one_json_document_with_the_documented_fields(
    command: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = cli.main([command, *report(command, tiny, tmp_path, monkeypatch), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status in (0, 1)
    if command not in ELSEWHERE:
        assert set(found) == documented(command)


def test_tiny_shows_that_what_it_wrote_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tiny", str(tmp_path / "a b"), *(f"--set={name}={value}" for name, value in SIZES.items())]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"values are right; the CPU reference generated with it", out)
    (generated,) = re.findall(r"^  generated +([\d ]+)$", out, re.MULTILINE)
    assert len(generated.split()) == 8
    assert f"next: python -m sglang.launch_server --model-path '{tmp_path / 'a b'}'" in out
    assert cli.main([*command, "--force", "--no-check"]) == 0
    assert "generated" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("draft", "flag"),
    [((), ""), (("--draft", "none"), "")]
    + [
        (("--draft", kind.lower()), f" --speculative-algorithm {DraftKind[kind].algorithm}")
        for kind in ("MTP", "DSPARK")
    ],
)
def test_tiny_says_how_to_draft_with_what_was_asked_for(
    draft: tuple[str, ...], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = (f"--set={name}={value}" for name, value in SIZES.items())
    assert cli.main(["tiny", str(tmp_path / "tiny"), *sizes, "--no-check", *draft]) == 0
    serve = f"python -m sglang.launch_server --model-path {tmp_path / 'tiny'}{flag}"
    assert capsys.readouterr().out.splitlines()[-1] == f"next: {serve}"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_doctor_describes_the_target_it_is_asked_about(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    from nvfp4_sgl.targets.choose import choose

    assert cli.main(["doctor", "--target", target, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["described_target"]) == ("cpu", target)
    assert found["boundaries"] == choose(target).boundaries.names() and list(found["kv_row_modes"]) == ["packed"]
