"""The commit-msg hook: a subject of at most 72 characters that begins with a verb in the imperative; why in the body.

``.pre-commit-config.yaml`` runs it with the message's file. Whether a verb is imperative is told by its form alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_CHARACTERS = 72
MADE_BY_GIT = re.compile(r"(?:Merge|Revert|fixup!|squash!|amend!) ")
NOT_VERBS = {"A", "An", "I", "It", "Its", "No", "Not", "Now", "The", "There", "These", "This", "We"}
VERBS = {
    *("Bleed", "Breed", "Bring", "Embed", "Exceed", "Feed", "Heed", "Need", "Ping", "Proceed", "Ring", "Seed", "Shed"),
    *("Sing", "Speed", "Spring", "Sting", "String", "Succeed", "Swing", "Wed", "Weed"),
    *("Alias", "Bias", "Canvas", "Focus"),
}
"""Imperatives that look like another form."""
PAST = {
    *("are", "became", "began", "begun", "bent", "bought", "broke", "broken", "brought", "built", "came", "caught"),
    *("chose", "chosen", "cleft", "crept", "dealt", "did", "done", "drawn", "drew", "driven", "drove", "dug", "fallen"),
    *("fell", "felt", "fought", "forgot", "forgotten", "found", "froze", "frozen", "gave", "given", "gone", "got"),
    *("grew", "grown", "had", "held", "hid", "hidden", "hung", "kept", "knew", "known", "laid", "left", "lent", "lost"),
    *("made", "meant", "met", "paid", "ran", "rode", "rose", "said", "sank", "saw", "seen", "sent", "shook", "shown"),
    *("shrank", "shrunk", "slept", "slid", "sought", "spent", "spoke", "spun", "stood", "stuck", "swept", "swung"),
    *("taken", "taught", "thought", "threw", "thrown", "told", "took", "tore", "torn", "went", "were", "woke", "won"),
    *("wore", "written", "wrote"),
}
"""Irregular past forms that are no imperative of another verb, as "bound" and "split" are."""
PREFIX = re.compile(r"^(?:re|un|over|out|under|up|with|mis)-?")


def faults(message: str) -> Iterator[str]:
    """Faults of a commit's message, each with what was expected and found; ``#`` begins git's own lines."""
    lines = [line for line in message.partition("\n# ------------------------ >8")[0].splitlines() if line[:1] != "#"]
    subject = lines[0].rstrip() if lines else ""
    if MADE_BY_GIT.match(subject):
        return
    if not subject:
        yield "subject: expected what the commit does, found none"
        return
    if len(subject) > MAX_CHARACTERS:
        yield f"subject: expected at most {MAX_CHARACTERS} characters, found {len(subject)}; move the why to the body"
    if subject.endswith("."):
        yield "subject: expected no full stop at its end"
    yield from verb_faults(subject.split()[0])
    if len(lines) > 1 and lines[1].strip():
        yield f"second line: expected it empty, found {lines[1]!r}"


def verb_faults(first: str) -> Iterator[str]:
    """Why the first word of a subject is no imperative, as far as its form tells."""
    word = first.rstrip(",:;")
    if not re.fullmatch(r"[A-Z][a-z]*(?:-[a-z]+)?", word):
        yield f"subject: expected a capitalised verb first, such as 'Add', found {first!r}"
    elif word in NOT_VERBS or is_past(word.lower()) or (word not in VERBS and re.search(r"(?:ed|ing|[^s]s)$", word)):
        yield f"subject: expected a verb in the imperative first, such as 'Add', not 'Added' or 'Adds'; found {first!r}"


def is_past(word: str) -> bool:
    """Whether a word, with or without a prefix such as "re", is an irregular past form."""
    return word in PAST or PREFIX.sub("", word, count=1) in PAST


def main(arguments: list[str]) -> int:
    (file,) = arguments
    found = list(faults(Path(file).read_text(encoding="utf-8")))
    for fault in found:
        print(f"commit message: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
