"""Sentences of Markdown pages and of Python's words, and the rules that they keep: length, figures, words, dates."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from tests.support.documents import FENCE

MOST_WORDS = 30
MOST_WORDS_ON_AVERAGE = 20
MOST_FIGURES = 2
"""In a sentence, and in a hundred words of a page outside its tables."""
NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNITS = {
    r"(?:ms|milliseconds?)\b": "ms",
    r"(?:[µμu]s|microseconds?)\b": "µs",
    r"(?:s|secs?|seconds?)\b(?!/)": "s",
    r"min(?:utes?)?\b": "min",
    r"(?:h|hours?)\b": "h",
    r"tok(?:ens?)?(?:/s(?:ec)?\b| a second| per second)": "tokens/s",
    r"(?:%|per ?cent\b)": "%",
    r"(?:[×x](?! ?\d|\w)|times\b|fold\b)": "×",
    **{rf"{unit}/s\b": f"{unit}/s" for unit in ("MB", "GB", "TB", "TFLOP")},
    **{rf"{unit}\b(?!/)": unit for unit in ("MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")},
    r"[kK]B\b(?!/)": "KB",
}
"""Pattern of a unit as pages write it, and its one name."""
NUMBERS = rf"(?:{NUMBER}(?:, and |, | and | to | or |[–-]))*{NUMBER}"
FIGURES = re.compile(rf"(?<![\w.^×/-])(?P<numbers>{NUMBERS})[ -]?(?P<unit>{'|'.join(UNITS)})")
BLANK = re.compile(r"[^\S\n]*\n(?!\s*\n)[^\S\n]*|[^\S\n]+")
MARKS = re.compile(r"`+|</?\w[^>]*>|(?<=\S)[*_]+|[*_]+(?=\S)")
MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
    r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
DATE = re.compile(
    r"\b20\d\d(?P<mark>[-/.])\d\d?(?P=mark)\d\d?(?!\d)|\b\d\d?[/.]\d\d?[/.]20\d\d\b"
    rf"|\b\d\d?(?:st|nd|rd|th|\.)?(?:\s+of)?[\s-]+{MONTH}(?!\w)(?:,?[\s-]+20\d\d\b)?"
    rf"|\b{MONTH}(?:\s+the)?\s+\d{{1,4}}(?:st|nd|rd|th)?\b"
)
"""Of a year, a month and a day in any order, or of a month and one of the others."""
COMMIT = re.compile(
    r"(?<![\w-])(?=\d*[a-f])[0-9a-f]{7,40}(?![\w-])|(?:commit|code|revision|sha)s?\W{1,4}\d{7,40}\b", re.IGNORECASE
)
"""Hexadecimal digits with a letter, or decimal ones where a word says that they are a commit."""
PRODUCT = r"(?<!dot )(?<!outer )(?<!inner )\bproducts?\b"
HISTORY = "nothing: history belongs in launch/results"
HOUSE_WORDS = {
    PRODUCT: "GEMM, or multiplication",
    r"\bnarrow side\b": "the MMA's N dimension",
    r"\bnone less\b": "no change",
    r"\b(?:takes? turns|turns of|arrivals)\b": "semaphore",
    r"\bwhere what\b": "subject, verb, object",
    r"(?-i:\b(?:Read|Used|Known|Written|Refused|Kept|Tested|Compared) are\b)": "subject, verb, object",
    r"(?-i:\bNot (?:there|run):)": "X has not been measured, or run",
    r"(?-i:\bBy (?:CI|runs)\b)": "CI shows, or runs show",
    r"\bstood still\b": "stopped, or made no progress",
    r"\bin (?:an|the) earlier run\b|\bthe run before\b|\bin another run\b": HISTORY,
    r"\bformerly\b|\b(?:the same|that) day\b|\bhas since\b": HISTORY,
    r"\btoday's\b": "the, or nothing",
    r"\bat hand\b": "available, or here",
    r"\bwalked\b": "followed, or run",
    r"\bso far only\b": "only",
}
"""Patterns of words that only this project used so, or that tell its history, in any case but where one has
``(?-i:…)``; and what to write instead."""
ANY_HOUSE_WORD = re.compile("|".join(HOUSE_WORDS), re.IGNORECASE)
ABBREVIATIONS = ("e.g.", "i.e.", "vs.", "etc.", "approx.", "cf.", "ca.", "incl.", "resp.", "Fig.", "Sec.", "Eq.")
"""A sentence goes on after these."""
CODE = "CODE"
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
INLINE = re.compile(r"`[^`]+`")
ITEM = re.compile(r"\s*(?:[*+-]|\d+\.)\s+")
GOES_ON = "".join(rf"(?<!\b(?i:{re.escape(word)}))" for word in ABBREVIATIONS)
END = re.compile(rf"(?<=[.?!]){GOES_ON}[\"')*_]*\s+(?=[\"'(\[*_]*\w)")


def plain(text: str) -> str:
    """``text`` as a browser shows it: no marks, no HTML, and one space for a line's end or any other blank."""
    return BLANK.sub(" ", MARKS.sub("", html.unescape(text)))


def figures(text: str) -> Iterator[tuple[Decimal, str]]:
    """(number, unit) of each measured figure."""
    for match in FIGURES.finditer(plain(text)):
        for found in re.findall(NUMBER, match["numbers"]):
            yield number(found), unit_named(match["unit"])


def number(text: str) -> Decimal:
    return Decimal(text.rstrip(",").replace(",", ""))


def unit_named(text: str) -> str:
    """The one name of a unit."""
    return next(unit for pattern, unit in UNITS.items() if re.fullmatch(pattern, text))


@dataclass(frozen=True)
class Sentence:
    """A sentence, where it begins, and what it stands in: ``text``, ``cell`` of a table or ``heading``."""

    line: int
    text: str
    kind: str = "text"

    @property
    def words(self) -> int:
        return sum(any(letter.isalnum() for letter in word) for word in self.text.split())

    @property
    def figures(self) -> int:
        """How many measured figures it holds."""
        return sum(1 for _ in figures(self.text))


def without(pattern: re.Pattern[str], text: str, by: str = "") -> str:
    """``text`` with each match replaced by ``by``, which may name a group, and with its line breaks kept."""

    def replaced(match: re.Match[str]) -> str:
        new = match.expand(by)
        return new + "\n" * (match[0].count("\n") - new.count("\n"))

    return pattern.sub(replaced, text)


def sentences(markdown: str) -> Iterator[Sentence]:
    """Sentences of a page: a sentence ends at a full stop, question or exclamation mark, item, cell or block.

    Fenced code, comments and pictures are left out, links are their text, and a word stands for code within a line.
    """
    text = without(COMMENT, without(FENCE, markdown))
    text = without(INLINE, without(LINK, without(IMAGE, text), r"\1"), CODE)
    block: list[tuple[int, str]] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        ends = not line.strip() or line.startswith(("#", "|")) or ITEM.match(line)
        if ends and block:
            yield from split(block)
            block = []
        if line.startswith("#"):
            yield Sentence(number, line.lstrip("# "), "heading")
        elif line.startswith("|"):
            for cell in line.strip().strip("|").split("|"):
                yield from (Sentence(number, one.text, "cell") for one in split([(number, cell)]))
        elif line.strip():
            block.append((number, ITEM.sub("", line, count=1) if ITEM.match(line) else line))


def split(block: list[tuple[int, str]]) -> Iterator[Sentence]:
    """Sentences of a paragraph, an item or a cell, given as numbered lines."""
    text = "\n".join(line for _, line in block)
    first = block[0][0]
    begin = 0
    for end in [*(match.end() for match in END.finditer(text)), len(text)]:
        if sentence := " ".join(text[begin:end].split()):
            yield Sentence(first + text[:begin].count("\n"), sentence)
        begin = end


def house_words(text: str) -> Iterator[str]:
    """Faults of ``text``: each house word, and what to write instead."""
    if not ANY_HOUSE_WORD.search(text):
        return
    for pattern, instead in HOUSE_WORDS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield f"house word {match[0]!r}: write {instead}"
