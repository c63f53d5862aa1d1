"""What is left out of the log of a start: a closed list of SGLang's messages, which this version of it has."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nvfp4_sgl.serving import start_log

MESSAGES = [(name, start) for name, starts in start_log.ALL_LEFT_OUT.items() for start in starts]


@pytest.fixture(autouse=True)
def own_filters(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Without the filters that an earlier test of this process left: servers' arguments set them."""
    caplog.set_level(logging.INFO)
    remove_filters()
    yield
    remove_filters()


def remove_filters() -> None:
    for name in start_log.ALL_LEFT_OUT:
        logging.getLogger(name).filters.clear()


@pytest.mark.parametrize(("name", "start"), MESSAGES, ids=str)
def test_listed_messages_alone_are_left_out(
    name: str, start: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    theirs = logging.getLogger(name)
    theirs.setLevel(logging.INFO)
    theirs.warning("%s and more", start)
    start_log.leave_out_false_lines()
    start_log.leave_out_false_lines()
    theirs.warning("%s and more", start)
    theirs.info("something else")
    assert caplog.messages == [f"{start} and more", "something else"]
    assert len(theirs.filters) == 1


def test_lines_of_graphs_are_left_out_without_a_gpu_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    start_log.leave_out_false_lines()
    for name, starts in start_log.LEFT_OUT_ON_CPU.items():
        logging.getLogger(name).warning(next(iter(starts)))
    assert caplog.messages == [start for starts in start_log.LEFT_OUT_ON_CPU.values() for start in starts]


def source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


@pytest.mark.parametrize(("name", "start"), MESSAGES, ids=str)
def test_sglang_says_so_there(name: str, start: str) -> None:
    assert start in source(name) and "logging.getLogger(__name__)" in source(name)


@pytest.mark.parametrize("module", start_log.IMPORT_WARNINGS)
def test_sglang_warns_so_there(module: str) -> None:
    assert start_log.IMPORT_WARNINGS[module] in source(module)


@pytest.mark.parametrize(
    ("command", "architecture", "left_out"),
    [
        ("--model-path DIR", "DeepseekV4ForCausalLM", True),
        ("--tp 2 --model-path=DIR --port 1", "DeepseekV4ForCausalLM", True),
        ("--model DIR", "DeepseekV4ForCausalLM", True),
        ("--model-path DIR", "LlamaForCausalLM", False),
        ("--model-path DIR/missing", "DeepseekV4ForCausalLM", False),
        ("--port DIR", "DeepseekV4ForCausalLM", False),
        ("--model-path", "DeepseekV4ForCausalLM", False),
    ],
)
def test_import_warnings_go_for_our_model_alone(
    command: str, architecture: str, left_out: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        start_log.leave_out_import_warnings(["launch_server.py", *command.replace("DIR", str(tmp_path)).split()])
        for start in start_log.IMPORT_WARNINGS.values():
            warnings.warn(f"{start} today", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert len(seen) == 1 + (0 if left_out else len(start_log.IMPORT_WARNINGS))


def test_a_damaged_checkpoint_is_no_matter_here(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    start_log.leave_out_import_warnings(["launch_server.py", "--model-path", str(tmp_path)])
