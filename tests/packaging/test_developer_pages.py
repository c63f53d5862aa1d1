"""Pages for developers: their code runs and its checks hold, and files define what the pages name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.packaging.checkout import ROOT
from tests.support.definitions import fault, named
from tests.support.documents import fences, table

PAGES = ("hopper_gemm_tutorial", "add_an_op", "add_a_storage", "add_an_architecture")


def text(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def run(page: str) -> None:
    """Run a page's Python from top to bottom, in one namespace."""
    namespace: dict[str, Any] = {"__name__": "a_page"}
    blocks = [(line, body) for line, language, body in fences(page) if language == "python"]
    assert len(blocks) > 1
    for line, body in blocks:
        exec(compile("\n" * (line - 1) + body, "a page", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_runs(page: str) -> None:
    run(text(page))


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        ("hopper_gemm_tutorial", "product.bfloat16()", "product.to(torch.float8_e4m3fn)"),
        ("hopper_gemm_tutorial", "magnitude << 6", "magnitude << 5"),
        ("hopper_gemm_tutorial", "stored << 4", "stored << 3"),
        ("hopper_gemm_tutorial", "(row + 8, column), (row, column + 8)", "(row, column + 8), (row + 8, column)"),
        ("hopper_gemm_tutorial", "(32 - left)", "(31 - left)"),
        ("hopper_gemm_tutorial", "* 2.0**VALUE_SHIFT *", "*"),
        ("add_an_op", "torch.tanh(scores.float() / cap)", "torch.tanh(scores.float())"),
        ("add_a_storage", '.float() * pieces.piece("row_scale")', ".float()"),
        ("add_a_storage", 'return "row_scale" in stored', "return True"),
        ("add_an_architecture", '"hidden_act": "relu"', '"hidden_act": "silu"'),
    ],
)
def test_a_wrong_step_is_seen(page: str, right: str, wrong: str) -> None:
    assert right in text(page)
    with pytest.raises(AssertionError):
        run(text(page).replace(right, wrong))


@pytest.mark.parametrize("page", PAGES)
def test_files_define_what_the_page_names(page: str) -> None:
    rows = table(text(page), "files")
    assert len(rows) > 5
    for step, *cells in rows:
        for cell in cells:
            places = named(cell)
            assert len(places) == 1, f"{step}: expected a file and what it defines, found {cell}"
            assert (found := fault(*places[0])) is None, f"{step}: {found}"
