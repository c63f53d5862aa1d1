"""The glossary of docs/how_it_works.md: few words, in order, each defined where it says."""

from __future__ import annotations

import pytest

from tests.packaging.checkout import ROOT
from tests.support.definitions import fault, named
from tests.support.documents import table

MOST = 25
"""Words: as many as a reader takes in at once; a longer list is a reason to call fewer things by words of our own."""
GLOSSARY = table((ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8"), "glossary")


def test_the_glossary_is_short_and_in_order() -> None:
    words = [row[0] for row in GLOSSARY]
    assert 0 < len(words) <= MOST
    assert words == sorted(set(words), key=str.casefold)


@pytest.mark.parametrize("row", GLOSSARY, ids=[row[0] for row in GLOSSARY])
def test_a_word_has_one_line_and_is_defined_where_it_says(row: list[str]) -> None:
    _, meaning, where = row
    assert len(meaning.split()) <= 20 and "." not in meaning
    ((file, symbol),) = named(where)
    assert fault(file, symbol) is None


@pytest.mark.parametrize(
    ("file", "symbol"),
    [
        ("nvfp4_sgl/no_such_file.py", "Form"),
        ("nvfp4_sgl/model/contract.py", "NoSuchForm"),
        ("nvfp4_sgl/model/contract.py", "Form.NVFP5"),
        ("docs/how_it_works.md", "No such heading"),
    ],
)
def test_what_is_not_defined_is_seen(file: str, symbol: str) -> None:
    assert fault(file, symbol) is not None


@pytest.mark.parametrize(
    ("file", "symbol"),
    [
        ("nvfp4_sgl/model/contract.py", "Form.NVFP4"),
        ("nvfp4_sgl/model/contract.py", "Operand.rows"),
        ("nvfp4_sgl/targets/target.py", "HOPPER"),
        ("docs/how_it_works.md", "Glossary"),
    ],
)
def test_what_is_defined_is_found(file: str, symbol: str) -> None:
    assert fault(file, symbol) is None
