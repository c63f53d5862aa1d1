"""``launch/demo``: its drafts by their option, and the trained model's answer in the emulator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from programs import demo

from nvfp4_sgl.checkpoint.drafts import DRAFTS, draft_kind
from nvfp4_sgl.checkpoint.verified import verify


@pytest.mark.parametrize("draft", [*demo.DRAFTED])
def test_the_checkpoint_bundles_the_draft(draft: str) -> None:
    checkpoint, algorithm = demo.DRAFTED[draft]
    assert demo.served(draft) == (checkpoint, (*demo.FLAGS, "--speculative-algorithm", algorithm))
    assert DRAFTS[algorithm].value.lower() == draft
    if checkpoint.is_dir():
        assert draft_kind(verify(checkpoint).inventory) is DRAFTS[algorithm]
        assert demo.parse_arguments(["--draft", draft]).draft == draft


def test_nothing_is_drafted_by_default() -> None:
    """It would start later."""
    assert demo.served(demo.parse_arguments([]).draft) == (demo.TRAINED, demo.FLAGS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "bf16"], "--draft mtp shows a trained draft behind a server: leave out --format"),
        (["--target", "sm_100a"], "--draft mtp shows a trained draft behind a server: leave out --target"),
        ([], "--draft mtp: expected a checkpoint in nowhere, found none; launch/train_small"),
    ],
)
def test_drafts_that_it_cannot_show(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(demo.DRAFTED, "mtp", (Path("nowhere"), "EAGLE"))
    with pytest.raises(SystemExit):
        demo.parse_arguments(["--draft", "mtp", *arguments])
    assert said in capsys.readouterr().err


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
