"""An answer that nothing may change: what a server is asked before and after it is mistreated."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.prompts import draw_ids
from tests.support.server import Server

PROMPT_TOKENS, TOKENS = 300, 24
"""More than a page, so that a second request reads the first one's cache."""

PAGE_TOKENS = 256
"""Prefixes are cached in whole pages."""

TOLERANCE = 1e-4
"""Tolerance of log-probabilities: sums take another order when a prompt is partly cached or batched with others."""


@dataclass(frozen=True)
class Golden:
    """Greedy ids and the log-probabilities of prompt and answer."""

    ids: list[int]
    logprobs: list[float]

    @classmethod
    def ask(cls, server: Server, *, vocab: int = 512) -> Golden:
        """Ask twice: with the prompt's own log-probabilities, computed anew; and with its first page from the cache."""
        prompt = draw_ids(PROMPT_TOKENS, 2024, vocab)
        anew = cls._ask(server, prompt, logprob_start_len=0)
        again = cls._ask(server, prompt)
        assert again.cached == PAGE_TOKENS and anew.cached == 0
        cls(anew.ids, anew.logprobs[-TOKENS:]).assert_same(cls(again.ids, again.logprobs))
        return cls(anew.ids, anew.logprobs)

    @staticmethod
    def _ask(server: Server, prompt: list[int], **fields: int) -> _Answer:
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling, **fields}
        answer = server.post("/generate", body)
        meta = answer["meta_info"]
        rows = [*meta.get("input_token_logprobs", [])[1:], *meta["output_token_logprobs"]]
        return _Answer(answer["output_ids"], [value for value, _, _ in rows], meta["cached_tokens"])

    def assert_same(self, other: Golden) -> None:
        assert other.ids == self.ids
        assert len(other.logprobs) == len(self.logprobs)
        assert max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)) <= TOLERANCE


@dataclass(frozen=True)
class _Answer:
    ids: list[int]
    logprobs: list[float]
    cached: int
