"""Rounds in which a server drafts and verifies, as its answers count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Rounds:
    """Rounds by how many of their guesses were right.

    Attributes:
        guesses: of a round. right: rounds with 0, 1, ... right guesses in front of the first wrong one.
    """

    guesses: int = 0
    right: Counter[int] = field(default_factory=Counter)

    def add(self, details: Mapping[str, Any]) -> None:
        """Add an answer's ``meta_info``, or its ``spec_tokens_details``: SGLang names the counts alike in both."""
        rounds = details.get("spec_verify_ct", 0)
        if rounds:  # an answer of one token has none
            self.guesses = max(self.guesses, details["spec_num_proposed_drafts"] // rounds)
            self.right.update(dict(enumerate(details["spec_correct_drafts_histogram"])))

    def add_answer(self, answer: Mapping[str, Any]) -> None:
        """Add an answer of the OpenAI API to a request with ``return_spec_tokens_details``."""
        self.add((answer.get("sglext") or {}).get("spec_tokens_details") or {})

    @property
    def count(self) -> int:
        return self.right.total()

    @property
    def tokens(self) -> float:
        """Tokens that a round gives, mean: its right guesses and the target's own token."""
        return 1 + sum(right * rounds for right, rounds in self.right.items()) / self.count

    @property
    def shares(self) -> list[float]:
        """Shares of right guesses by place, behind right ones of the round alone; short of places never come to."""
        found = []
        for place in range(self.guesses):
            reached, right = (sum(n for most, n in self.right.items() if most >= least) for least in (place, place + 1))
            if reached:
                found.append(right / reached)
        return found

    def line(self) -> str:
        if not self.count:
            return "no round of draft and verify"
        places = ", ".join(f"{share:.0%}" for share in self.shares)
        return f"{self.tokens:.2f} tokens a round, of {self.count} rounds; right guesses by place: {places}"

    def as_json(self) -> dict[str, Any]:
        """``tokens`` is ``None`` without a round."""
        tokens = self.tokens if self.count else None
        return {"rounds": self.count, "tokens": tokens, "guesses": self.guesses, "right_by_place": self.shares}
