"""Greedy tokens of rows of logits, and what rounds of drafts make of them."""

from __future__ import annotations

import torch

from nvfp4_sgl.triton_kernels.logits import markov
from nvfp4_sgl.triton_kernels.logits.accept import accept_guesses
from nvfp4_sgl.triton_kernels.logits.greedy import BLOCK, greedy_tokens
from nvfp4_sgl.triton_kernels.plan import relay
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


@case("_accept_guesses")
def guesses_that_are_accepted() -> Outputs:
    """Requests of six rows: no guess is right, some are, all are, and those behind a wrong one."""
    generator = torch.Generator().manual_seed(6)
    answers = torch.randint(9, (4, 6), generator=generator)
    guesses = torch.full_like(answers, 9)
    for request, right in enumerate((0, 2, 5)):
        guesses[request, 1 : right + 1] = answers[request, :right]
    guesses[3, 2:] = answers[3, 1:-1]
    found = accept_guesses(guesses, answers, torch.tensor([1 << 20, 7, 300, 0]))
    names = ("lengths", "right", "places", "tokens", "last", "ends")
    return dict(zip(names, found, strict=True))


@case("_keep_rows")
def rows_that_are_kept() -> Outputs:
    """Streams of a part and a piece of one, int32 tokens, slots in no order."""
    generator = torch.Generator().manual_seed(7)

    def left(rows: int, tokens: torch.dtype) -> relay.Left:
        ids = torch.randint(-1, 129280, (2, rows), generator=generator)
        streams = torch.randn(rows, relay.BLOCK + 24, generator=generator).bfloat16()
        return relay.Left(
            ids[0].to(tokens), ids[1, :, None].contiguous(), torch.rand(rows, 1, generator=generator), streams
        )

    kept = left(7, torch.int64)
    relay.keep_rows(torch.tensor([5, 0, 3]), left(3, torch.int32), kept)
    return kept._asdict()
