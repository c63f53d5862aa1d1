"""``launch/demo --target sm_100a``: the trained model answers in the emulator as the CPU reference does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from programs import demo


@pytest.mark.full
@pytest.mark.timeout(900)
def test_its_first_token_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of the two that it gives: a minute or two of a core each."""
    asked: list[Any] = []

    def note(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        asked.append((command, env))
        return subprocess.CompletedProcess(command, 0)

    with monkeypatch.context() as context:
        context.setattr(demo.subprocess, "run", note)
        assert demo.emulate(demo.TRAINED) == 0
    ((command, env),) = asked
    assert command[-2:] == ["--tokens", "2"]
    done = subprocess.run([*command[:-1], "1"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulated          '7'" in done.stdout
    assert done.stdout.endswith("of 1 steps where the reference is confident, 1 agree\n")
