"""The walks of docs/contributing.md: at most three files each, and every file defines the symbol that it names."""

from __future__ import annotations

import pytest

from tests.packaging.checkout import ROOT
from tests.support.definitions import fault, named
from tests.support.documents import table

MOST = 3
"""Places of a question: what stands in more has no place."""
WALKS = table((ROOT / "docs" / "contributing.md").read_text(encoding="utf-8"), "walks")


def test_every_question_has_a_walk() -> None:
    assert len({question for question, _ in WALKS}) == len(WALKS) >= 10


@pytest.mark.parametrize(("question", "walk"), WALKS, ids=[question for question, _ in WALKS])
def test_a_walk_is_short_and_leads_to_the_code(question: str, walk: str) -> None:
    places = named(walk)
    assert len(places) == len(walk.split("→")), f"{question}: expected a file and a symbol at each place"
    assert 0 < len(places) <= MOST, question
    faults = [found for file, symbol in places if (found := fault(file, symbol)) is not None]
    assert not faults, f"{question}: {faults}"
