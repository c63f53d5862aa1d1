"""The task: documents of facts, noise and questions, of which each answer stands in a fact far before.

A document is a sequence of groups of four characters, one token each:

* a fact ``a=7;`` gives the key ``a`` the value ``7``; no key gets two,
* a question ``?a7;`` asks for a key that a fact gave a value before: after ``?a`` the answer follows,
* noise, four characters without meaning.

A group fills one window of the ratio-4 compressor. Where a fact is more than 128 tokens away, the sliding window no
longer holds it: only compressed entries do.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from functools import cache

from nvfp4_sgl.synthetic.tokenizer import build_tokenizer

KEYS = string.ascii_letters
VALUES = string.digits
NOISE = "-_+*/~^|"
GROUP = 4
ANSWER_OFFSET = 2
"""Place of the answer in its group."""
CHANCE = 1 / len(VALUES)
MEASURED_TOKENS, MEASURED_KEYS, MEASURED_QUESTIONS = 512, 40, 12
"""Sizes of the documents that figures are measured on: tokens, facts, questions."""
GAP = 160
"""Tokens of noise between the last fact and the first question of :func:`far_document`: more than a window."""
VOCABULARY = 320


@dataclass(frozen=True)
class Document:
    """``answers``: places of the answers in ``text``; every character is a token."""

    text: str
    answers: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        return [_id_of(character) for character in self.text]


@cache
def _ids() -> dict[str, int]:
    vocabulary: dict[str, int] = build_tokenizer(VOCABULARY).get_vocab()
    return vocabulary


def _id_of(character: str) -> int:
    return _ids()[character]


def question_id() -> int:
    """Token id that a question begins with; two tokens on stands its answer."""
    return _id_of(question("a")[0])


def value_ids() -> list[int]:
    """Token ids of the possible answers."""
    return [_id_of(value) for value in VALUES]


def fact(key: str, value: str) -> str:
    return f"{key}={value};"


def question(key: str, value: str = "") -> str:
    """The question for ``key``, up to its answer, or with it."""
    return f"?{key}{value};" if value else f"?{key}"


def _noise(rng: random.Random) -> str:
    return "".join(rng.choices(NOISE, k=GROUP))


def training_document(rng: random.Random, tokens: int, keys: int) -> Document:
    """Facts for at most ``keys`` keys, questions and noise mixed; ``tokens`` is a multiple of 4."""
    left = rng.sample(KEYS, keys)
    known: dict[str, str] = {}
    groups: list[str] = []
    answers: list[int] = []
    for place in range(tokens // GROUP):
        draw = rng.random()
        if left and (not known or draw < 0.35):
            key = left.pop()
            known[key] = rng.choice(VALUES)
            groups.append(fact(key, known[key]))
        elif draw < 0.9:
            key = rng.choice(list(known))
            groups.append(question(key, known[key]))
            answers.append(place * GROUP + ANSWER_OFFSET)
        else:
            groups.append(_noise(rng))
    return Document("".join(groups), tuple(answers))


def far_document(rng: random.Random, tokens: int, keys: int, questions: int) -> Document:
    """Facts in noise, then :data:`GAP` tokens of noise, then questions for different keys: none has a near answer.

    Raises:
        ValueError: there is no room for ``keys`` facts.
    """
    front = tokens // GROUP - GAP // GROUP - questions
    if not questions <= keys <= front:
        raise ValueError(f"{tokens} tokens: expected {questions} to {front} keys, found {keys}")
    chosen = rng.sample(KEYS, keys)
    values = {key: rng.choice(VALUES) for key in chosen}
    groups = [fact(key, value) for key, value in values.items()]
    groups += [_noise(rng) for _ in range(front - keys)]
    rng.shuffle(groups)
    groups += [_noise(rng) for _ in range(GAP // GROUP)]
    first = len(groups)
    groups += [question(key, values[key]) for key in rng.sample(chosen, questions)]
    return Document("".join(groups), tuple((first + i) * GROUP + ANSWER_OFFSET for i in range(questions)))
