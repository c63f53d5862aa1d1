"""Log-probabilities of one server beside another's, for the same tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.bf16_logprobs import References, generate
from tests.support.server import Server

TOKENS = 24
QUANTILES = torch.tensor([0.5, 0.9])
FACTORS = torch.tensor([2.0, 3.0])
"""Bounds of the median difference and of the one that 90 % stay below, by what rounding costs the CPU reference.

Both servers may be as far from fp32 as rounding takes the reference, so twice that from each other; the upper quantile
scatters, as flipped choices move all that follows.
"""


@dataclass(frozen=True)
class Scored:
    """Prompt and answer, and the log-probabilities of the tokens from ``first`` on, each given those before it."""

    tokens: list[int]
    first: int
    values: Tensor
    cached: int

    @classmethod
    def ask(cls, server: Server, ids: Sequence[int], start: int = 0, tokens: int = TOKENS) -> Scored:
        """Greedy continuation; log-probabilities of the prompt's tokens behind position ``start``, too."""
        return cls.of(ids, generate(server, ids, tokens, logprob_start_len=start))

    @classmethod
    def of(cls, ids: Sequence[int], answer: dict[str, Any]) -> Scored:
        meta = answer["meta_info"]
        # The first one is of the token at which the log-probabilities begin: it is not given.
        rows = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        tokens = [*ids, *answer["output_ids"]]
        assert [token for _, token, _ in rows] == tokens[len(tokens) - len(rows) :]
        values = torch.tensor([value for value, _, _ in rows])
        assert bool(torch.isfinite(values).all())
        return cls(tokens, len(tokens) - len(rows), values, meta["cached_tokens"])

    def differences(self, other: Scored) -> Tensor:
        """Of the tokens that both scored behind the same tokens."""
        same = 0
        for one, another in zip(self.tokens, other.tokens, strict=False):
            if one != another:
                break
            same += 1
        first = max(self.first, other.first)
        mine, theirs = (scored.values[first - scored.first : same - scored.first] for scored in (self, other))
        return (mine - theirs).abs()


def differences(found: Iterable[Scored], expected: Iterable[Scored]) -> Tensor:
    return torch.cat([one.differences(other) for one, other in zip(found, expected, strict=True)])


class Yardstick:
    """What rounding costs the CPU reference, on the tokens of some prompts. Begins at once, in other processes."""

    def __init__(self, references: References, prompts: Sequence[Sequence[int]]):
        self._prompts, self._awaited = prompts, [references.begin(ids) for ids in prompts]

    def bounds(self) -> Tensor:
        """:data:`FACTORS` times the quantiles of its differences."""
        found = []
        for ids, future in zip(self._prompts, self._awaited, strict=True):
            rounded, exact = (known[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0] for known in future.result())
            found.append((rounded - exact).abs())
        return FACTORS * torch.cat(found).quantile(QUANTILES)


def is_within(found: Tensor, bounds: Tensor, what: str) -> bool:
    """Whether differences stay below the bounds of their quantiles; prints both."""
    quantiles = found.quantile(QUANTILES)
    print(f"{what}: {len(found)} differences, median and 90 %: {quantiles.tolist()}, bounds {bounds.tolist()}")
    return bool((quantiles <= bounds).all())
