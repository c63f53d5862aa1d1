"""What pages name exists: symbols in their files, modules, and variables of the environment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.packaging.checkout import KERNEL_FOLDERS, ROOT
from tests.support.definitions import MODULE, fault, module_fault, named
from tests.support.documents import pages

VARIABLE = re.compile(r"\b(?:NVFP4_SGL|SGLANG)_[A-Z_0-9]+\b")
PAGES = [page for page in pages() if page.name != "CHANGELOG.md"]
"""All but the page that names what is gone."""


def variables() -> set[str]:
    """Variables that this project's files or SGLang read."""
    (sglang,) = find_spec("sglang").submodule_search_locations  # type: ignore[misc]
    files = ("srt/environ.py", "srt/entrypoints/http_server.py")
    found = {name for file in files for name in VARIABLE.findall((Path(sglang) / file).read_text(encoding="utf-8"))}
    for folder in ("nvfp4_sgl", "launch", *KERNEL_FOLDERS):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in ("", ".py", ".yaml", ".sh") and file.is_file():
                found |= set(VARIABLE.findall(file.read_text(encoding="utf-8")))
    return found


def faults(text: str, known: set[str]) -> Iterator[str]:
    """What a page names and is not there."""
    yield from filter(None, (fault(file, symbol) for file, symbol in named(text)))
    yield from filter(None, (module_fault(match[0]) for match in MODULE.finditer(text) if not match[0].endswith(".py")))
    yield from (f"{name}: nothing reads it" for name in sorted(set(VARIABLE.findall(text)) - known))


@pytest.fixture(scope="module")
def known() -> set[str]:
    return variables()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path, known: set[str]) -> None:
    found = list(faults(page.read_text(encoding="utf-8"), known))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`COMMANDS` and `GONE` in `nvfp4_sgl/cli.py`", "nvfp4_sgl/cli.py: does not define GONE"),
        ("`GONE`, `COMMANDS`\nof `nvfp4_sgl/cli.py`", "nvfp4_sgl/cli.py: does not define GONE"),
        ("`COMMANDS` in `nvfp4_sgl/gone.py`", "nvfp4_sgl/gone.py: no such file"),
        ("| `nvfp4_sgl/cli.py` `gone` |", "nvfp4_sgl/cli.py: does not define gone"),
        ("`nvfp4_sgl.gone.cli`", "nvfp4_sgl.gone.cli: nvfp4_sgl/__init__.py does not define it"),
        ("`nvfp4_sgl.cli.gone`", "nvfp4_sgl.cli.gone: nvfp4_sgl/cli.py does not define it"),
        ("`NVFP4_SGL_GONE=1`", "NVFP4_SGL_GONE: nothing reads it"),
    ],
)
def test_what_is_gone_is_seen(text: str, expected: str) -> None:
    assert list(faults(text, {"NVFP4_SGL_DISABLE"})) == [expected]


def test_what_is_there_passes() -> None:
    text = "`COMMANDS` in `nvfp4_sgl/cli.py`, `nvfp4_sgl.cutedsl_kernels.w4a4`, `nvfp4_sgl.cli.COMMANDS`"
    assert not list(faults(text, {"NVFP4_SGL_DISABLE"}))
