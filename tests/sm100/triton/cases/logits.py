"""Greedy tokens of rows of logits."""

from __future__ import annotations

import torch

from nvfp4_sgl.triton_kernels.logits import markov
from nvfp4_sgl.triton_kernels.logits.greedy import BLOCK, greedy_tokens
from tests.sm100.triton.cases.case import Outputs, case


@case("_greedy_tokens")
def largest_logits() -> Outputs:
    """Two parts a row; a row has failed, and one has its largest logit twice."""
    logits = torch.randn(3, BLOCK + 40, generator=torch.Generator().manual_seed(4))
    logits[1, BLOCK + 3] = torch.nan
    logits[2, 9] = logits[2, BLOCK + 1] = 50.0
    semaphores = torch.zeros(3, dtype=torch.int32)
    tokens, failed = greedy_tokens(logits, semaphores, mark=-1)
    return {"tokens": tokens, "failed": failed, "logits": logits, "semaphores": semaphores}


@case("_markov_step")
def guesses_of_a_block() -> Outputs:
    """Two parts of the vocabulary, requests in two programs, a rank in two pieces. Sums of integers have no order."""
    generator = torch.Generator().manual_seed(5)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    width = markov.BLOCK + 9
    w1, w2 = (integers(width, 80).bfloat16() for _ in range(2))
    base, anchor = 8 * integers(33, 2, width), torch.arange(33) * 4
    base[3, 0], base[4, 1, :9] = torch.nan, torch.nan
    semaphores = torch.zeros(2, dtype=torch.int32)
    return {"tokens": markov.draft_greedily(base, anchor, w1, w2, semaphores), "semaphores": semaphores}
