"""docs/hopper_gemm_tutorial.md: its code runs and its checks hold; each check fails if what it shows is broken."""

from __future__ import annotations

from typing import Any

import pytest

from tests.packaging.checkout import ROOT
from tests.support.definitions import fault, named
from tests.support.documents import fences, table

PAGE = (ROOT / "docs" / "hopper_gemm_tutorial.md").read_text(encoding="utf-8")


def run(page: str) -> None:
    """Run the page's Python from top to bottom, in one namespace."""
    namespace: dict[str, Any] = {}
    for line, language, body in fences(page):
        if language == "python":
            exec(compile("\n" * (line - 1) + body, "hopper_gemm_tutorial.md", "exec"), namespace)


def test_the_code_runs() -> None:
    run(PAGE)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("product.bfloat16()", "product.to(torch.float8_e4m3fn)"),
        ("magnitude << 6", "magnitude << 5"),
        ("stored << 4", "stored << 3"),
        ("(row + 8, column), (row, column + 8)", "(row, column + 8), (row + 8, column)"),
        ("(32 - left)", "(31 - left)"),
        ("* 2.0**VALUE_SHIFT *", "*"),
    ],
)
def test_a_wrong_step_is_seen(right: str, wrong: str) -> None:
    assert right in PAGE
    with pytest.raises(AssertionError):
        run(PAGE.replace(right, wrong))


def test_files_define_what_the_page_names() -> None:
    places = named("".join(where for _, where in table(PAGE, "files")))
    assert len(places) == len(table(PAGE, "files")) > 5
    assert not [found for file, symbol in places if (found := fault(file, symbol))]
