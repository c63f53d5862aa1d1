"""What commands print fits a terminal of 80 columns; progress and broken lines are for terminals alone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from nvfp4_sgl import cli
from nvfp4_sgl.terminal import Counter, Status, fitted

LONG = "  sm_100a refuses " + "word " * 40 + "/a/path-with-hyphens/" + "x" * 90


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", Terminal())
    lines = fitted(f"short\n\n{LONG}").split("\n")
    assert lines[:2] == ["short", ""] and lines[2].startswith("  sm_100a refuses word")
    assert all(line.startswith("      ") for line in lines[3:])
    assert all(len(line) <= 80 for line in lines[:-1]) and lines[-1].split() == [LONG.split()[-1]]
    assert " ".join(lines[2:]).split() == LONG.split()


def test_pipes_get_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert fitted(LONG) == LONG


def test_a_counter_is_for_terminals() -> None:
    for stream, expected in ((Terminal(), "\rtensors: 1\rtensors: 2\r\033[K"), (io.StringIO(), "")):
        counter = Counter("tensors:", stream)
        counter.advance()
        counter.advance()
        counter.end()
        assert stream.getvalue() == expected


def test_commands_fit_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    terminal, printed = Terminal(), Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", printed)
    assert cli.main(["tiny", "t", "--format", "deepseek"]) == 0
    assert terminal.getvalue().startswith("\rtensors drawn: 1\r") and terminal.getvalue().endswith("\r\033[K")
    assert cli.main(["inspect", "t", "--values"]) == 0
    cli.main(["doctor", "t"])
    cli.main(["convert", "t", "u", "--dry-run"])
    wide = [line for line in printed.getvalue().splitlines() if len(line) > 80 and " " in line.strip()]
    assert not wide


def test_a_status_is_written_over_on_terminals_and_said_now_and_then_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    clock = iter([0.0, 1.0, 6.0] * 2)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    wiped = "\r\033[K"
    for stream, expected in (
        (Terminal(), f"{wiped}trace: first{wiped}trace: second{wiped}trace: {'x' * 12}{wiped}"),
        (io.StringIO(), f"trace: first\ntrace: {'x' * 30}\n"),
    ):
        with Status("trace", stream) as status:
            for what in ("first", "second", "x" * 30):
                status.say(what)
        assert stream.getvalue() == expected
