"""The table of architectures: a package adds the toy of docs/add_an_architecture.md, and nothing else changes."""

from __future__ import annotations

import json
import pkgutil
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvfp4_sgl import cli
from nvfp4_sgl.architectures import DEEPSEEK_V4, GROUP, architectures, is_served, read_config, unread_fields
from nvfp4_sgl.errors import ConfigError, UnsupportedError
from nvfp4_sgl.serving import arguments, registration
from nvfp4_sgl.serving.sglang.hooked import HOOKS
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.packaging.checkout import ROOT
from tests.support.installed_package import write_package

PAGE = (ROOT / "docs/add_an_architecture.md").read_text()
(TOY,) = re.findall(r"`toy_model/architecture\.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
(PLUGIN,) = re.findall(r"`toy_model/plugin\.py`.*?:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
POINTS = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])["project"]["entry-points"]

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts the page's package, with this text, on the path as an installed distribution."""

    def add(text: str) -> None:
        files = {"toy_model/architecture.py": text, "toy_model/plugin.py": PLUGIN}
        write_package(tmp_path / "site", "toy_model", files, GROUP, POINTS[GROUP])
        monkeypatch.syspath_prepend(tmp_path / "site")
        architectures.cache_clear()

    yield add
    architectures.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_model"]:
        del sys.modules[name]


def tiny_pair(folder: Path) -> tuple[Path, Path]:
    """The same tiny checkpoint, as DeepSeek-V4's and as the toy's."""
    paths = folder / "deepseek", folder / "toy"
    for path in paths:
        write_tiny(path, "nvfp4-full", seed=5)
    raw = json.loads((paths[1] / "config.json").read_text())
    raw |= {"architectures": ["ToyForCausalLM"], "window_tokens": raw.pop("sliding_window")}
    (paths[1] / "config.json").write_text(json.dumps(raw))
    return paths


def test_deepseek_v4_alone_is_there() -> None:
    assert architectures() == (DEEPSEEK_V4,)
    drafts = {"DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark"}
    assert set(DEEPSEEK_V4.classes()) == {"DeepseekV4ForCausalLM", *drafts}


def test_it_computes_what_deepseek_v4_does(install: Install, tmp_path: Path) -> None:
    deepseek, toy = tiny_pair(tmp_path)
    with pytest.raises(ConfigError, match="architectures"):
        Standalone(toy, requests=1)
    install(TOY)
    with torch.no_grad():
        ours, toys = (Standalone(path, requests=1).extend({0: [5, 9, 300]})[0] for path in (deepseek, toy))
    assert torch.equal(ours, toys)


def test_commands_and_server_know_it(install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, toy = tiny_pair(tmp_path)
    assert not arguments.is_our_checkpoint(toy)
    install(TOY)
    assert arguments.is_our_checkpoint(toy)
    assert registration.is_ours(SimpleNamespace(architectures=["ToyForCausalLM"]))
    assert cli.main(["inspect", str(toy)]) == 0
    assert re.search("^cpu +serves it$", capsys.readouterr().out, re.MULTILINE)
    named = {name: found for each in architectures() for name, found in each.classes().items()}
    assert named["ToyForCausalLM"] is named[DEEPSEEK_V4.name]


def test_inspect_knows_the_fields_that_its_reader_reads(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, toy = tiny_pair(tmp_path)
    install(TOY)
    raw = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps(raw | {"new_gate": True}))
    assert cli.main(["inspect", str(toy)]) == 0
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert "field 'new_gate' is not known here and was not read" in note


def test_fields_of_one_architecture_are_unknown_in_others(install: Install) -> None:
    install(TOY)
    fields = {"window_tokens": 128, "new_gate": True}
    assert unread_fields({"architectures": ["ToyForCausalLM"], **fields}) == ["new_gate"]
    for names in (["DeepseekV4ForCausalLM"], None, "ToyForCausalLM"):
        assert unread_fields({"architectures": names, **fields}) == ["new_gate", "window_tokens"]


def test_its_plugin_shows_sglang_the_names_that_it_knows(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(TOY)
    hooked: dict[str, Callable[..., Any]] = {}
    monkeypatch.setattr(find("HookRegistry"), "register", lambda path, hook, kind: hooked.update({path: hook}))
    pkgutil.resolve_name(POINTS["sglang.srt.plugins"]["toy"])()
    load = hooked[HOOKS["load_hf_config"].path]
    toy, other = load(lambda: SimpleNamespace(architectures=["ToyForCausalLM"], window_tokens=64)), SimpleNamespace()
    assert toy.architectures == [DEEPSEEK_V4.name] and toy.sliding_window == 64
    other.architectures = ["LlamaForCausalLM"]
    assert load(lambda: other) is other and vars(other) == {"architectures": ["LlamaForCausalLM"]}


def test_its_reader_refuses_what_it_lacks(install: Install, tmp_path: Path) -> None:
    _, toy = tiny_pair(tmp_path)
    install(TOY)
    raw = json.loads((toy / "config.json").read_text())
    del raw["window_tokens"]
    with pytest.raises(ConfigError, match="sliding_window"):
        read_config(raw)


@pytest.mark.parametrize("names", [None, [], "ToyForCausalLM", ["LlamaForCausalLM"], [["ToyForCausalLM"]], {}])
def test_others_are_not_served(names: object, install: Install) -> None:
    install(TOY)
    assert not is_served(names) and not is_served(names, drafts=True)


def test_drafts_are_served_where_they_are_asked_for() -> None:
    assert not is_served([DEEPSEEK_V4.draft])
    assert is_served([DEEPSEEK_V4.draft], drafts=True) and not is_served([""], drafts=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'; repair or remove"),
        ("TOY = 1", "expected Architecture of nvfp4_sgl.architectures, found int"),
        (
            TOY.replace('"ToyForCausalLM"', "DEEPSEEK_V4.name"),
            "found DeepseekV4ForCausalLM, which is registered already; rename it",
        ),
        (
            TOY.replace('"ToyForCausalLM"', "DEEPSEEK_V4.draft"),
            "found DeepseekV4ForCausalLMNextN, which is registered already; rename it",
        ),
        (
            TOY.replace(", read,", ", read, draft=DEEPSEEK_V4.draft,"),
            "found DeepseekV4ForCausalLMNextN, which is registered already; rename it",
        ),
    ],
)
def test_one_that_cannot_be_added_is_named(text: str, message: str, install: Install) -> None:
    install(text)
    with pytest.raises(UnsupportedError, match=re.escape(message)) as raised:
        architectures()
    assert f"entry point toy of {GROUP}, toy_model.architecture:TOY" in str(raised.value)
