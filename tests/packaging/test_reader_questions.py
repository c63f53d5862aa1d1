"""The questions for readers: twenty with a key, and ten things to find; each page and heading that they name exists."""

from __future__ import annotations

import pytest
import yaml

from tests.packaging.checkout import ROOT
from tests.support.definitions import fault
from tests.support.documents import table

TEXT = (ROOT / "tests" / "packaging" / "reader_questions.md").read_text(encoding="utf-8")
QUESTIONS, TO_FIND = table(TEXT, "questions"), table(TEXT, "menu")
PLACES = sorted({(page, heading) for *_, page, heading in QUESTIONS + TO_FIND})


def test_there_are_twenty_questions_with_a_key() -> None:
    assert len({question for question, *_ in QUESTIONS}) == len(QUESTIONS) == 20
    assert all(question.endswith("?") and key for question, key, _, _ in QUESTIONS)


def test_ten_things_are_found_from_the_menu() -> None:
    nav = yaml.safe_load((ROOT / "launch" / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    entries = [entry for section in nav for under in section.values() if isinstance(under, list) for entry in under]
    in_menu = {f"docs/{file}" for entry in entries for file in entry.values()}
    assert len({what for what, *_ in TO_FIND}) == len(TO_FIND) == 10
    assert not [page for _, page, _ in TO_FIND if page not in in_menu]


@pytest.mark.parametrize(("page", "heading"), PLACES, ids=str)
def test_a_page_has_the_heading(page: str, heading: str) -> None:
    assert fault(page, heading) is None
