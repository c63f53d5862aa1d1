"""Exit statuses are those of the table in docs/command_line.md, in every subcommand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvfp4_sgl import cli
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.packaging.checkout import ROOT

READERS = [name for name in cli.COMMANDS if name != "tiny"]
"""Commands that take a DIR."""
MORE = {"convert": ["OUT"], "build": ["--target", "sm_100a"], "layertest": ["--layer", "0"]}
PLACES = {
    "nothing": "nothing",
    "a file": "file",
    "an empty folder": "empty",
    "a folder of the hub's cache": "models--a--b",
    "an unfinished conversion": "half",
}
"""What a DIR may be, and its name."""
FINDS_DAMAGE = ("verify", "doctor")
"""Commands that are asked whether a checkpoint is damaged."""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4_sgl.targets.choose.detect_target", lambda: "cpu")


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of which a file of weights has gone."""
    directory = tmp_path_factory.mktemp("damaged") / "tiny"
    write_tiny(directory, "nvfp4-full", num_hidden_layers=1, n_routed_experts=6)
    next(iter(sorted(directory.glob("*.safetensors")))).unlink()
    return directory


def run(command: str, directory: Path, folder: Path) -> int:
    more = [str(folder / "out") if word == "OUT" else word for word in MORE.get(command, [])]
    return cli.main([command, str(directory), *more])


@pytest.mark.parametrize("found", PLACES)
@pytest.mark.parametrize("command", READERS)
def test_what_is_no_checkpoint_is_2(
    command: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "models--a--b" / "snapshots" / "beef").mkdir(parents=True)
    (tmp_path / "half" / ".nvfp4_sgl_convert").mkdir(parents=True)
    assert run(command, tmp_path / PLACES[found], tmp_path) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    assert said.err.startswith(f"nvfp4-sgl: error: {tmp_path / PLACES[found]}")


@pytest.mark.parametrize("command", READERS)
def test_a_damaged_checkpoint_is_2_but_where_damage_is_looked_for(
    command: str, damaged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command, damaged, tmp_path) == (1 if command in FINDS_DAMAGE else 2)
    said = capsys.readouterr()
    assert "model-00001-of-00003.safetensors" in (said.out if command in FINDS_DAMAGE else said.err)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_wrong_command_line_is_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--no-such-option"])
    assert end.value.code == 2 and not capsys.readouterr().out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_ctrl_c_is_130(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{cli.COMMANDS[command].module}.run", interrupted)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("nvfp4_sgl.terminal.end_descendants", lambda: None)  # other tests' servers are ours, too
    assert run(command, Path("x"), Path("y")) == 130
    assert capsys.readouterr().err == "\nnvfp4-sgl: interrupted\n"


def test_the_page_has_these_statuses() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\d+) \|", page, re.MULTILINE) == ["0", "1", "2", "130"]
    assert all(f"`{name}`" in page for name in FINDS_DAMAGE)


def test_out_that_cannot_be_used_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without anything being imported or said before: the folder holds a stranger's file."""
    write_tiny(tmp_path / "tiny", "nvfp4-full", num_hidden_layers=1, n_routed_experts=6)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("x")
    for command in (["tiny"], ["convert", str(tmp_path / "tiny")]):
        assert cli.main([*command, str(tmp_path / "full")]) == 2
        assert capsys.readouterr().out == ""
