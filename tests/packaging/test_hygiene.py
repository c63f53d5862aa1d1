"""The files speak of the project alone and work on any machine."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT

# Spelt apart, so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.}\])*-])/(?:" + "|".join(["work", "tmp", "root", "farm", "opt", "home"]) + r")/\w")
PACKAGE_INDEX = re.compile("file:" + "//|--(?:extra-)?index" + "-url|--find" + "-links|/simp" + "le/")


def text_files() -> list[Path]:
    """What git tracks (or would track), as far as it is text."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / line for line in listed.splitlines()]
    return [file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:4096]]


@pytest.mark.parametrize("pattern", [MACHINE_PATH, PACKAGE_INDEX], ids=["machine path", "package index"])
def test_nothing_of_one_machine(pattern: re.Pattern[str]) -> None:
    files = text_files()
    assert len(files) > 20
    hits = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("path", ["/" + "tmp/x", "see /" + "root/a", "'/" + "work/main'", "(/" + "home/me)"])
def test_machine_paths_are_seen(path: str) -> None:
    assert MACHINE_PATH.search(path)


@pytest.mark.parametrize("path", ["launch/test", "$HOME/tmp/x", "tests/work/a", "/usr/bin/env", "${X}/opt/y"])
def test_other_paths_pass(path: str) -> None:
    assert not MACHINE_PATH.search(path)


@pytest.mark.parametrize(
    "name", ["launch/environment", "launch/test", "launch/demo", "launch/docs", "launch/lock", ".ci/run"]
)
def test_scripts_run_as_they_are(name: str) -> None:
    script = ROOT / name
    assert os.access(script, os.X_OK), f"{name} is not executable"
    first = script.read_text().splitlines()[0]
    assert first in ("#!/usr/bin/env bash", "#!/usr/bin/env python3")
    if first.endswith("bash"):
        subprocess.run(["bash", "-n", script], check=True)
