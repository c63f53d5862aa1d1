"""The lines of a server's start: timed, on the first rank alone, and without SGLang's that are wrong for our model."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4_sgl.serving import stages


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("nvfp4_sgl.serving.sglang_private.tp_rank", lambda: 0)
    yield
    for name in stages.FALSE_WARNINGS:
        logging.getLogger(name).filters.clear()


def test_a_stage_says_its_words_and_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with stages.stage("weights") as words:
        words.append("1.00 GB")
    assert caplog.messages == ["nvfp4_sgl: weights: 1.00 GB, 0.0 s"]


def test_a_stage_that_fails_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), stages.stage("weights"):
        raise ZeroDivisionError
    assert not caplog.messages


def test_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("nvfp4_sgl.serving.sglang_private.tp_rank", lambda: 1)
    stages.say("weights", "words")
    assert not caplog.messages


@pytest.mark.parametrize(("name", "start"), stages.FALSE_WARNINGS.items())
def test_false_warnings_alone_are_left_out(name: str, start: str, caplog: pytest.LogCaptureFixture) -> None:
    theirs = logging.getLogger(name)
    theirs.warning("%s provided", start)
    stages.leave_out_false_warnings()
    stages.leave_out_false_warnings()
    theirs.warning("%s provided", start)
    theirs.warning("something else")
    assert caplog.messages == [f"{start} provided", "something else"]
    assert len(theirs.filters) == 1


@pytest.mark.parametrize(("name", "start"), stages.FALSE_WARNINGS.items())
def test_sglang_says_so_there(name: str, start: str) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    assert start in Path(spec.origin).read_text() and "logging.getLogger(__name__)" in Path(spec.origin).read_text()
