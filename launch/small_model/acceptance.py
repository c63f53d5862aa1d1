"""Guesses of a draft that the target accepts, in rounds of draft and verify as a server has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint.drafts import draft_kind
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import CheckpointError
from small_model.guessing import Bundled, Draft, Lookup, Target
from small_model.task import ANSWER_OFFSET, MEASURED_TOKENS, Document, question_id

ANSWERED = 64
"""Tokens that the target answers a document with."""
STEPS = 3
"""Tokens that MTP guesses a round."""


@dataclass
class Counts:
    """Counts of rounds: their number, the tokens that they gave, and guesses behind right ones alone.

    Attributes:
        places, answers, form: [right, guessed]; by place in the round, of answers, of everything else.
    """

    rounds: int = 0
    tokens: int = 0
    places: dict[int, list[int]] = field(default_factory=dict)
    answers: list[int] = field(default_factory=lambda: [0, 0])
    form: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, place: int, is_answer: bool, is_right: bool) -> None:
        for counted in (self.places.setdefault(place, [0, 0]), self.answers if is_answer else self.form):
            counted[0] += is_right
            counted[1] += 1

    def row(self) -> str:
        """Cells of a table."""
        by_place = " ".join(share(self.places[place]) for place in sorted(self.places))
        a_round = f"{self.tokens / self.rounds:.2f}"
        return f"{a_round} | {by_place} | {share(self.answers)} | {share(self.form)}"


def share(counted: Sequence[int]) -> str:
    right, guessed = counted
    return f"{100 * right / guessed:.0f} %" if guessed else "–"


def rounds(target: Target, draft: Draft, prompt: Sequence[int], text: Sequence[int] | None, counts: Counts) -> None:
    """Draft and verify behind ``prompt``, and count.

    Args:
        text: what follows, whose tokens stand for what a target samples; ``None``: the target's likeliest tokens, of
            which there are :data:`ANSWERED`.
    """
    target.model.reset()
    draft.reset()
    goal, known = len(prompt) + (ANSWERED if text is None else len(text)), [*prompt]
    logits, streams = target.read(prompt)
    known.append(int(logits[-1].argmax()) if text is None else text[0])
    while len(known) < goal:
        start, new = len(known) - 1, known[-len(streams[0]) :]
        guesses = draft.guess(streams, new)
        logits, streams = target.read([known[-1], *guesses])
        said = logits.argmax(-1).tolist()
        if text is not None:
            said = [*text[start + 1 - len(prompt) :], *said][: len(said)]
        for place, answer in enumerate(said):
            known.append(answer)
            if place == len(guesses) or len(known) >= goal:
                break
            counts.add(place, known[-3] == question_id(), guesses[place] == answer)
            if guesses[place] != answer:
                break
        if len(known) >= goal:
            return  # cut short
        counts.rounds, counts.tokens = counts.rounds + 1, counts.tokens + len(known) - 1 - start
        target.model.caches.take_back(0, len(known) - 1)
        streams = [each[: len(known) - 1 - start] for each in streams]


def acceptance(checkpoint: Path, documents: Sequence[Document], **options: Any) -> Iterator[str]:
    """Lines of a table on the draft that a checkpoint bundles, and on prompt lookup of as many tokens.

    Args:
        options: of :class:`nvfp4_sgl.standalone.Standalone`.
    """
    verified = verify(checkpoint)
    kind = draft_kind(verified.inventory)
    if kind is None:
        remedy = "name a checkpoint that launch/train_small wrote with one"
        raise CheckpointError(f"{checkpoint}: expected a draft under 'mtp.', found none; {remedy}")
    target = Target(verified, MEASURED_TOKENS + 2 * ANSWERED, **options)
    draft = Bundled(target, verified, STEPS)
    count = STEPS if draft.dspark is None else draft.dspark.block
    drafts: dict[str, Draft] = {
        f"{kind.value}, {count} guesses": draft,
        f"{kind.value} rounded to NVFP4": Bundled(target, verified, STEPS, rounded=True),
        f"prompt lookup, {count} guesses": Lookup(count),
    }
    yield f"{len(documents)} documents of {MEASURED_TOKENS} tokens. Greedy: {ANSWERED} tokens that the target answers."
    yield "Else: the document's own questions, whose keys nothing tells. Right guesses: behind right ones of a round."
    yield ""
    yield "| guesses | text | tokens a round | right, by place | right answers | right form |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for text in ("greedy", "the document's"):
        for name, guesses in drafts.items():
            counts = Counts()
            for document in documents:
                first = len(document.ids) if text == "greedy" else document.answers[0] - ANSWER_OFFSET
                rounds(target, guesses, document.ids[:first], document.ids[first:] or None, counts)
            yield f"| {name} | {text} | {counts.row()} |"
