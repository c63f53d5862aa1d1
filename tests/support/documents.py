"""Commands, paths and code in the project's Markdown pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.packaging.checkout import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)]*)\)|\b(?:href|src)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s>\"']+))")
INLINE = re.compile(r"`([^`]+)`")
SHELL = ("bash", "text", "")
"""Languages of fences that hold commands; of one without ``bash`` only lines that begin as our commands do."""
LANGUAGES = (*SHELL, "json", "python", "toml", "yaml")
FENCE_MARK = re.compile(r"\s*(?:`{3,}|~{3,})")
LAUNCHERS = ("launch/", "nvfp4-sgl ", "python ")
STARTS_COMMAND = re.compile(r"(?:\w+=\S+ )*(?:launch/\w|nvfp4-sgl |python )")


@dataclass(frozen=True)
class Command:
    """A command line of a page, split as a shell splits it.

    Attributes:
        whole: it stands in a fence, so it can be run once its placeholders are filled in; otherwise in running text.
    """

    page: str
    line: int
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.words)}"


def pages() -> list[Path]:
    """Every page that a reader is led to."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def fences(text: str) -> Iterator[tuple[int, str, str]]:
    """(first line's number, language, body) of each fenced block."""
    for match in FENCE.finditer(text):
        yield text[: match.start()].count("\n") + 2, match[1], match[2]


def unread(text: str) -> Iterator[tuple[int, str]]:
    """(line, what) of code that nothing here would read: fences of other marks and languages, and indented code."""
    within, before = False, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if FENCE_MARK.match(line):
            if line not in ({"```"} if within else {f"```{language}" for language in LANGUAGES}):
                yield number, f"{line}: expected ``` and at most one of {', '.join(filter(None, LANGUAGES))}"
            within = not within
        elif not within and not before and re.match(r"(?: {4}|\t)[^*+\d-]", line):
            yield number, f"{line}: expected a fence, found indented code"
        before = line.strip()


@dataclass(frozen=True)
class Link:
    """Where a link of a page leads: a file beside it, itself where ``path`` is empty, and a section of that."""

    line: int
    path: str
    section: str


def links(text: str) -> Iterator[Link]:
    """Every link of a page, in Markdown or HTML, but those that lead elsewhere."""
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = INLINE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in LINK.finditer(text):
        target = next(filter(None, match.groups()), "").strip().split(" ")[0].strip("<>")
        if "://" not in target and not target.startswith("mailto:"):
            path, _, section = target.partition("#")
            yield Link(text[: match.start()].count("\n") + 1, path, section)


def references(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each link by reference, which pages do not use: undefined, it would read as brackets."""
    text = INLINE.sub("", FENCE.sub(lambda match: "\n" * match[0].count("\n"), text))
    for match in re.finditer(r"\]\s?\[[^\]]*\]|^\s*\[[^\]]+\]:", text, re.MULTILINE):
        yield text[: match.start()].count("\n") + 1, match[0]


def sections(text: str) -> set[str]:
    """Anchors of a page: of its headings, and those set by hand."""
    named = re.findall(r"\bid=[\"']([^\"']+)", text)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in headings(text)} | set(named)


def commands(page: str, text: str) -> Iterator[Command]:
    """Every command of a page, in fences and in running text."""
    for start, language, body in fences(text):
        if language not in SHELL:
            continue
        for line, logical in logical_lines(start, body, quotes=language == "bash"):
            if language != "bash" and not STARTS_COMMAND.match(logical):
                continue
            if words := without_assignments(shlex.split(logical, comments=True)):
                yield Command(page, line, tuple(words), whole=True)
    prose = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in INLINE.finditer(prose):
        code = " ".join(match[1].split())
        if code.startswith(LAUNCHERS):
            words = without_assignments(shlex.split(code))
            yield Command(page, prose[: match.start()].count("\n") + 1, tuple(words), whole=False)


def logical_lines(start: int, body: str, *, quotes: bool) -> Iterator[tuple[int, str]]:
    """(number, text) of each line of a shell fence, lines that end with a backslash joined.

    With ``quotes`` those that end within a quoted word are joined, too.
    """
    joined, first = "", start
    for number, line in enumerate(body.splitlines(), start=start):
        first = first if joined else number
        joined += line.removesuffix("\\") + " "
        if not line.endswith("\\") and not (quotes and ends_in_quotes(joined)):
            yield first, joined
            joined = ""
    if joined:
        yield first, joined


def ends_in_quotes(text: str) -> bool:
    """Whether a quoted word of a shell's line is not closed."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def without_assignments(words: list[str]) -> list[str]:
    """A command without ``NAME=value`` before it, and by its own name instead of ``$env/bin/NAME``."""
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        words = words[1:]
    if words and words[0].startswith("$env/bin/"):
        words = [words[0].removeprefix("$env/bin/"), *words[1:]]
    return words


def table(text: str, name: str) -> list[list[str]]:
    """Cells of a page's table between ``<!-- name -->`` and ``<!-- end -->``, row by row, without the heading."""
    marked = text.partition(f"<!-- {name} -->\n")[2].partition("<!-- end -->")[0]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in marked.splitlines()[2:]]


def headings(text: str) -> list[str]:
    """The headings of a page, without their marks."""
    prose = FENCE.sub("", text)
    return [match[1].strip() for match in re.finditer(r"^#+ (.+)$", prose, re.MULTILINE)]
