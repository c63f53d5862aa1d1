"""docs/add_a_target.md: its package is built from the page, and its target works like one of our own."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvfp4_sgl import cli
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.target import GROUP, targets, words
from tests.packaging.checkout import ROOT
from tests.support.installed_package import write_package

PAGE = (ROOT / "docs/add_a_target.md").read_text()
FILES = dict(re.findall(r"`(toy_target/\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
REGISTERED = tomllib.loads(re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0])["project"]["entry-points"]

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts the page's package, with changes of its files, on the path as an installed distribution."""

    def add(**changes: str) -> None:
        files = {name: str(changes.get(Path(name).stem, text)) for name, text in FILES.items()}
        write_package(tmp_path / "site", "toy_target", files, GROUP, REGISTERED[GROUP])
        monkeypatch.syspath_prepend(tmp_path / "site")
        targets.cache_clear()

    yield add
    targets.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_target"]:
        del sys.modules[name]


def test_the_page_has_a_whole_package() -> None:
    assert set(FILES) == {"toy_target/boundaries.py", "toy_target/descriptor.py"}
    assert "toy" not in words()


def test_every_command_knows_it(install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    folder = tmp_path / "tiny"
    write_tiny(folder, "nvfp4-full")
    assert words() == ("cpu", "sm_90a", "sm_100a", "toy")
    assert cli.main(["inspect", str(folder)]) == 0
    assert re.search("^toy +serves it$", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["layertest", str(folder), "--layer", "1", "--target", "toy", "--prompt", "40"]) == 0
    assert "on toy, w4a16" in capsys.readouterr().out
    cli.main(["doctor", str(folder), "--target", "toy", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["boundaries"]["project"] == "toy_target.boundaries:ExactProjection"
    assert report["activation_modes"] == ["w4a16"] and report["note"] == "a toy"
    with pytest.raises(SystemExit):  # it names no GPU to compile for
        cli.main(["build", str(folder), "--target", "toy"])
    assert "invalid choice: 'toy'" in capsys.readouterr().err


def test_its_boundary_computes(install: Install, tmp_path: Path) -> None:
    install()
    folder = tmp_path / "tiny"
    write_tiny(folder, "nvfp4-full")
    with torch.no_grad():
        ours, toys = (
            Standalone(folder, target=word, requests=1).extend({0: [5, 9, 300]})[0] for word in ("cpu", "toy")
        )
    assert not torch.equal(ours, toys)
    torch.testing.assert_close(ours, toys, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("descriptor", "message"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'; repair or remove"),
        ("TOY = 1", "expected Descriptor of nvfp4_sgl.targets.target, found int; repair or remove that package"),
        ("from nvfp4_sgl.targets.target import HOPPER as TOY", "found those of hopper; change them"),
        (FILES["toy_target/descriptor.py"].replace('name="toy"', 'name="cpu"'), "found those of cpu; change them"),
        (FILES["toy_target/descriptor.py"].replace('word="toy"', 'word="cpu"'), "found those of cpu; change them"),
        (
            FILES["toy_target/descriptor.py"].replace("modes=", "capabilities=((9, 0),), modes="),
            "found some of hopper; change them",
        ),
    ],
)
def test_one_that_cannot_be_added_is_named(descriptor: str, message: str, install: Install) -> None:
    install(descriptor=descriptor)
    with pytest.raises(UnsupportedError, match=re.escape(message)) as raised:
        words()
    assert f"entry point toy of {GROUP}, toy_target.descriptor:TOY" in str(raised.value)
