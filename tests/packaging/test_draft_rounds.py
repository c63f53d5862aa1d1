"""Rounds of draft and verify, from the counts in answers."""

from __future__ import annotations

import random
import sys

import pytest

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from programs.draft_rounds import Rounds

GUESSES = 3


def test_they_are_those_counted_guess_by_guess() -> None:
    rng, found = random.Random(1), Rounds()
    tokens, rounds, places = 0, 0, [[0, 0] for _ in range(GUESSES)]
    for _ in range(20):
        histogram = [0] * (GUESSES + 1)
        for _ in range(count := rng.randint(1, 30)):
            right = 0
            for place in range(GUESSES):
                is_right = rng.random() < (0.8, 0.5, 0.3)[place]
                places[place][0] += is_right
                places[place][1] += 1
                if not is_right:
                    break
                right += 1
            histogram[right] += 1
            tokens, rounds = tokens + right + 1, rounds + 1
        counts = {"spec_verify_ct": count, "spec_num_proposed_drafts": GUESSES * count}
        details = counts | {"spec_correct_drafts_histogram": histogram}
        found.add_answer({"sglext": {"spec_tokens_details": details}})
    assert (found.count, found.guesses) == (rounds, GUESSES)
    assert found.tokens == pytest.approx(tokens / rounds)
    assert found.shares == pytest.approx([right / guessed for right, guessed in places])


def test_places_that_no_round_came_to() -> None:
    """SGLang's histogram ends with the most right guesses of a round."""
    found = Rounds()
    found.add({"spec_verify_ct": 4, "spec_num_proposed_drafts": 12, "spec_correct_drafts_histogram": [3, 1]})
    assert found.shares == [0.25, 0] and found.tokens == 1.25
    assert found.line() == "1.25 tokens a round, of 4 rounds; right guesses by place: 25%, 0%"


@pytest.mark.parametrize("answer", [{}, {"sglext": None}, {"sglext": {"spec_tokens_details": None}}])
def test_answers_without_rounds(answer: dict[str, None]) -> None:
    found = Rounds()
    found.add_answer(answer)
    assert found.line() == "no round of draft and verify"
    assert found.as_json() == {"rounds": 0, "tokens": None, "guesses": 0, "right_by_place": []}
