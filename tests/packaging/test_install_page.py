"""docs/install.md: the versions that it names, and that both of SGLang's commands start the same server."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.packaging.checkout import ROOT
from tests.support.documents import table

PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def wanted(distribution: str, name: str) -> str | None:
    """The versions of ``name`` that an installed distribution asks for; ``None`` if it asks for none."""
    needed = [Requirement(text) for text in requires(distribution) or ()]
    found = [str(one.specifier) for one in needed if one.name == name and "extra" not in str(one.marker)]
    return found[0] if found else None


def test_what_the_package_asks_for() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = [Requirement(text) for text in tomllib.load(file)["project"]["dependencies"]]
    documented = {name.strip("`"): version for name, version, _ in table(PAGE, "pins")}
    assert documented == {one.name: _version(str(one.specifier)) for one in needed}


@pytest.mark.parametrize(("name", "version", "alone"), table(PAGE, "pins")[1:])
def test_what_sglang_asks_for_by_itself(name: str, version: str, alone: str) -> None:
    asked = wanted("sglang", name.strip("`"))
    if alone.startswith("torch asks for "):
        assert asked is None and wanted("torch", name.strip("`")) == alone.removeprefix("torch asks for ")
    else:
        words = {None: "not asked for", "": "any", f"=={version}": "the same"}
        assert alone == words.get(asked, _version(asked or ""))


def _version(specifier: str) -> str:
    """A specifier as the page writes it: bounds from below first, ``==`` left out."""
    return ",".join(sorted(specifier.removeprefix("==").split(","), reverse=True))


def test_what_the_page_says_of_versions_and_variables() -> None:
    from nvfp4_sgl import __version__
    from nvfp4_sgl.plugin import DISABLE_VARIABLE

    assert f"dist/nvfp4_sgl-{__version__}-py3-none-any.whl" in PAGE and f"{DISABLE_VARIABLE}=1" in PAGE
    assert f"SGLang {wanted('nvfp4-sgl', 'sglang')}".replace("==", "") in PAGE
    (image,) = re.findall(r"ARG SGLANG_IMAGE=(.*)", (ROOT / "launch" / "container" / "Dockerfile").read_text())
    assert f"`{image}`" in PAGE


def test_both_commands_start_the_same_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sglang serve`` loads plugins before it reads flags, as ``python -m sglang.launch_server`` does."""
    import sglang.cli.serve as command
    import sglang.launch_server
    import sglang.srt.plugins
    import sglang.srt.server_args

    steps: list[Any] = []

    def prepare(words: list[str]) -> str:
        steps.append(words)
        return "arguments"

    monkeypatch.setattr(sglang.srt.plugins, "load_plugins", lambda: steps.append("plugins"))
    monkeypatch.setattr(sglang.srt.server_args, "prepare_server_args", prepare)
    monkeypatch.setattr(sglang.launch_server, "run_server", steps.append)
    monkeypatch.setattr(command, "get_is_diffusion_model", lambda path: False)
    monkeypatch.setattr(command, "kill_process_tree", lambda *_, **__: None)
    command.serve(None, ["DIR", "--tp-size", "2"])
    assert steps == ["plugins", ["--model-path", "DIR", "--tp-size", "2"], "arguments"]
