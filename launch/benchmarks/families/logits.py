"""Greedy tokens with the check of the logits, at DeepSeek-V4's vocabulary; torch's operators are the peer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.peers import compared
from nvfp4_sgl.ops import greedy as reference
from nvfp4_sgl.ops.greedy import FAILED
from nvfp4_sgl.triton_kernels.logits.greedy import greedy_tokens

from . import Case

VOCABULARY = 129280
ROWS = (1, 16, 64, 256)


def cases() -> Iterator[Case]:
    semaphores = torch.zeros(max(ROWS), dtype=torch.int32, device="cuda")
    for rows in ROWS:
        logits = torch.randn(rows, VOCABULARY, device="cuda")
        ours = partial(greedy_tokens, logits, semaphores, mark=FAILED)
        tokens, _ = ours()
        yield Case(
            f"greedy_tokens/{rows}x{VOCABULARY}",
            ours,
            bytes=logits.nbytes + 9 * rows,
            peers={"torch, five operators": compared(partial(_by_torch, logits), tokens)},
        )


def _by_torch(logits: torch.Tensor) -> torch.Tensor:
    return reference.greedy_tokens(logits)[0]
