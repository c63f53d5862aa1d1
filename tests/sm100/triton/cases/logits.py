"""Greedy tokens of rows of logits."""

from __future__ import annotations

import torch

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
