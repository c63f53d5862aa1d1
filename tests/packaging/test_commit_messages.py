"""The commit-msg hook: a subject that is too long or no imperative stops a commit, and says what was expected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))

from programs import commit_message

HOOK = ROOT / "launch" / "programs" / "commit_message.py"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", "subject: expected what the commit does, found none"),
        ("# a comment of git's\n", "subject: expected what the commit does, found none"),
        ("Add " + "x" * 69, "subject: expected at most 72 characters, found 73"),
        ("Add a target.", "subject: expected no full stop"),
        ("add a target", "subject: expected a capitalised verb first"),
        ("docs: add a target", "subject: expected a capitalised verb first"),
        ("Added a target", "not 'Added' or 'Adds'; found 'Added'"),
        ("Adds a target", "found 'Adds'"),
        ("Adding a target", "found 'Adding'"),
        ("Fixes a target", "found 'Fixes'"),
        ("Passes the mask", "found 'Passes'"),
        *(
            (f"{word} a target", f"found '{word}'")
            for word in ("Built", "Made", "Ran", "Wrote", "Found", "Kept", "Went")
        ),
        *((f"{word} a target", f"found '{word}'") for word in ("Gave", "Rewrote", "Re-ran", "Overrode", "Written")),
        ("The target is added", "found 'The'"),
        ("Add a target\nand why", "second line: expected it empty, found 'and why'"),
    ],
)
def test_a_fault_is_named(message: str, expected: str) -> None:
    found = list(commit_message.faults(message))
    assert any(expected in fault for fault in found), found


@pytest.mark.parametrize(
    "message",
    [
        "Add a target",
        "Add " + "x" * 68,
        "Pass the mask; bring the rank\n\nWhy.",
        "Re-lay the scales",
        "Bound the queue",
        "Split the sum",
        "Reread the file",
        "Merge branch 'a' of https://example.org/" + "x" * 60,
        'Revert "Add a target"',
        "fixup! Add a target",
        "Add a target\n\nWhy.\n# ------------------------ >8 ------------------------\ndiff --git",
    ],
)
def test_what_is_fine_passes(message: str) -> None:
    assert not list(commit_message.faults(message))


@pytest.mark.parametrize(("subject", "committed"), [("Add a file", True), ("Added a file", False)])
def test_git_runs_it(subject: str, committed: bool, tmp_path: Path) -> None:
    """As a commit-msg hook of a repository; git gives it the file of the message."""
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    hook = tmp_path / ".git" / "hooks" / "commit-msg"
    hook.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HOOK}" "$@"\n')
    hook.chmod(0o755)
    author = ["-c", "user.name=author", "-c", "user.email=author@example.org"]
    command = ["git", *author, "commit", "--quiet", "--allow-empty", "--message", subject]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) == committed, done.stderr
    assert committed or "found 'Added'" in done.stderr


def test_pre_commit_installs_it() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert set(config["default_install_hook_types"]) == {"pre-commit", "commit-msg"}
    (repository,) = config["repos"]
    (hook,) = (hook for hook in repository["hooks"] if hook["id"] == "commit-message")
    assert hook["stages"] == ["commit-msg"] and str(HOOK.relative_to(ROOT)) in hook["entry"]
