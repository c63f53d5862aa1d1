"""User pages read fast: short sentences, few figures, the field's words, no history. A fault names line and rule."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.checkout import ROOT
from tests.support import documents, prose

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
from benchmarks import pages
from benchmarks.figures import recorded

REFERENCES = ("specification.md", "formats.md")
"""Pages whose sentences enumerate, and whose figures are bounds."""
PAGES = documents.pages()
RELEASE = re.compile(r"^## \[[\d.]+\] - .*$", re.MULTILINE)
"""A heading of CHANGELOG.md, which has the release's date."""
COMMITS = {figure.code for figure in recorded() if figure.code}


def faults(name: str, text: str) -> Iterator[str]:
    """``file:line: rule`` of each fault of a page."""
    found = list(prose.sentences(text))
    for sentence in found:
        for fault in (*prose.house_words(sentence.text), *(() if name in REFERENCES else size_faults(sentence))):
            yield f"{name}:{sentence.line}: {fault}: {sentence.text[:100]}"
    for line, fault in history(text):
        yield f"{name}:{line}: {fault}: belongs in launch/results"
    if name in REFERENCES:
        return
    running = [sentence for sentence in found if sentence.kind == "text"]
    words, figures = sum(one.words for one in running), sum(one.figures for one in running)
    if running and words / len(running) > prose.MOST_WORDS_ON_AVERAGE:
        yield f"{name}:1: mean sentence: at most {prose.MOST_WORDS_ON_AVERAGE} words, found {words / len(running):.1f}"
    most = 0 if name == "CHANGELOG.md" else prose.MOST_FIGURES
    if figures * 100 > most * words and figures > most:
        yield f"{name}:1: figures outside tables: at most {most} in 100 words, found {figures} in {words}"


def size_faults(sentence: prose.Sentence) -> Iterator[str]:
    """Too many words or figures."""
    if sentence.words > prose.MOST_WORDS:
        yield f"length: at most {prose.MOST_WORDS} words, found {sentence.words}"
    if sentence.kind == "text" and sentence.figures > prose.MOST_FIGURES:
        yield f"figures: at most {prose.MOST_FIGURES} in a sentence, found {sentence.figures}; use a table"


def history(text: str) -> Iterator[tuple[int, str]]:
    """(line, what) of each date and commit, in code, too; what is filled from the data has both."""
    own = prose.without(RELEASE, prose.without(pages.BLOCK, text))
    named = re.compile("|".join(rf"\b{code}\b" for code in sorted(COMMITS)))
    for what, pattern in (("date", prose.DATE), ("commit", prose.COMMIT), ("commit", named)):
        for match in pattern.finditer(own):
            yield own[: match.start()].count("\n") + 1, f"{what} {' '.join(match[0].split())}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_user_page_reads_fast(page: Path) -> None:
    found = list(faults(page.name, page.read_text(encoding="utf-8")))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("word " * 31 + ".", "page.md:3: length: at most 30 words, found 31"),
        ("word " * 15 + "word; " + "word " * 15, "page.md:3: length: at most 30 words, found 31"),
        ("It takes 3 ms, 4 ms or 5 %.", "page.md:3: figures: at most 2 in a sentence, found 3"),
        ("It takes 3 ms.\nIt takes 4 ms. It takes 5 ms.", "page.md:1: figures outside tables: at most 2 in 100 words"),
        (("word " * 24 + "end. ") * 3, "page.md:1: mean sentence: at most 20 words, found 25.0"),
        ("Fine.\n\nThe experts' first product runs.", "page.md:5: house word 'product': write GEMM"),
        ("Measured (H200, 2026-11-26).", "page.md:3: date 2026-11-26: belongs in launch/results"),
        ("Measured on 26 November 2026.", "page.md:3: date 26 November 2026: belongs in launch/results"),
        ("Measured on 26-Nov-2026.", "page.md:3: date 26-Nov-2026: belongs in launch/results"),
        ("Measured on 2026/11/26.", "page.md:3: date 2026/11/26: belongs in launch/results"),
        ("Measured on Nov\n26.", "page.md:3: date Nov 26: belongs in launch/results"),
        ("Measured in November 2026.", "page.md:3: date November 2026: belongs in launch/results"),
        ("Measured at `2026-11-26T10:20Z`.", "page.md:3: date 2026-11-26: belongs in launch/results"),
        ("Measured at 82a0868.", "page.md:3: commit 82a0868: belongs in launch/results"),
        ("Measured at `82a0868`.", "page.md:3: commit 82a0868: belongs in launch/results"),
        ("Measured at 82A0868FF.", "page.md:3: commit 82A0868FF: belongs in launch/results"),
        ("Measured at abcdefa.", "page.md:3: commit abcdefa: belongs in launch/results"),
        ("Measured at 1125735.", "page.md:3: commit 1125735: belongs in launch/results"),
        ("Of commit `9876543`.", "page.md:3: commit commit `9876543: belongs in launch/results"),
        ("Products run.", "page.md:3: house word 'Products': write GEMM"),
        ("One, etc. and " + "word " * 29, "page.md:3: length: at most 30 words, found 32"),
        ("For approx. ten or e.g. two, " + "word " * 26, "page.md:3: length: at most 30 words, found 32"),
        ("* One.\n* " + "word " * 31, "page.md:4: length: at most 30 words, found 31"),
        ("| a | b |\n| --- | --- |\n| " + "word " * 31 + "| c |", "page.md:5: length: at most 30 words, found 31"),
    ],
    ids=[
        "a long sentence",
        "clauses joined by a semicolon",
        "figures in a sentence",
        "figures in a page",
        "long sentences",
        "a house word",
        *(
            "a date",
            "a date in words",
            "a date with hyphens",
            "a date with slashes",
            "a date over a line's end",
            "a month",
            "a time",
        ),
        *("a commit", "a commit in code", "a commit in capitals", "a commit of letters", "a recorded commit"),
        *("a commit of digits", "a house word with a capital", "etc.", "other abbreviations"),
        "an item",
        "a cell",
    ],
)
def test_a_fault_is_found_with_its_line_and_rule(text: str, expected: str) -> None:
    assert any(fault.startswith(expected) for fault in faults("page.md", f"# Page\n\n{text}\n"))


@pytest.mark.parametrize(
    "text",
    [
        "word " * 29 + "end. Next.",
        "```bash\n" + "word " * 40 + "\n```",
        "See [" + "word " * 10 + "](" + "a" * 50 + ".md), `" + "word " * 40 + "`.",
        "It reads 8,192 of 1048576 tokens in 128 × 128 tiles by DeepSeek-V4's dot product; 8. Decode may 3.",
        "First: e.g. this goes on.\n* " + "word " * 20 + "\n* " + "word " * 18,
    ],
    ids=["two sentences", "a fence", "a link and code", "no figures", "items"],
)
def test_what_is_fine_passes(text: str) -> None:
    assert not list(faults("page.md", f"# Page\n\n{text}\n"))


def test_the_change_log_has_dates_of_releases_and_no_figures() -> None:
    text = "# Changelog\n\n## [0.1.0] - 2026-12-01\n\n* **Faster.** Decodes"
    assert not list(faults("CHANGELOG.md", f"{text} sooner.\n"))
    (found,) = faults("CHANGELOG.md", f"{text} 3 µs sooner.\n")
    assert found.startswith("CHANGELOG.md:1: figures outside tables: at most 0")


def test_a_reference_page_may_enumerate_and_has_no_history() -> None:
    (found,) = faults("formats.md", f"# Page\n\n{'word ' * 60}3 ms, 4 ms, 5 ms, since November 2026.\n")
    assert "date November 2026" in found


def test_what_is_filled_from_the_data_has_dates_and_commits() -> None:
    text = "<!-- figures: case -->\n\n| date |\n| --- |\n| 2026-11-26 |\n\nCode: 82a0868.\n\n<!-- end of figures -->"
    assert not list(faults("page.md", text))


def opening_faults(text: str) -> Iterator[str]:
    """What a notebook's opening lacks: after the title a table, then two short sentences to take away."""
    blocks = [block for block in text.split("\n\n") if block.strip()]
    table, takeaway = [*blocks, "", ""][1:3]
    if not table.startswith("| "):
        yield "expected a table after the title"
    found = list(prose.sentences(takeaway))
    if len(found) != 2 or any(sentence.kind != "text" for sentence in found):
        yield f"expected two sentences after the table, found {len(found)}"
    yield from (f"{one.words} words: {one.text}" for one in found if one.words > prose.MOST_WORDS)


@pytest.mark.parametrize("notebook", sorted((ROOT / "launch" / "results").glob("*.md")), ids=lambda file: file.stem)
def test_a_notebook_opens_with_a_table_and_what_to_take_away(notebook: Path) -> None:
    assert not list(opening_faults(notebook.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "# Run\n\nFirst. Second.\n\n| a |\n| --- |\n| b |\n",
        "# Run\n\n| a |\n| --- |\n| b |\n\nOnly one.\n",
        "# Run\n\n| a |\n| --- |\n| b |\n\n" + "word " * 31 + ". Second.\n",
    ],
    ids=["no table first", "one sentence", "a long sentence"],
)
def test_an_opening_without_either_is_seen(text: str) -> None:
    assert list(opening_faults(text))
