"""Launches of a round of drafts between its graphs: acceptance, and what is kept for the next round.

Peer: torch's operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.peers import compared
from nvfp4_sgl.ops import drafts as reference
from nvfp4_sgl.triton_kernels.logits.accept import accept_guesses
from nvfp4_sgl.triton_kernels.plan.relay import Left, keep_rows

from . import Case

REQUESTS = (1, 16, 64)
ROWS = (4, 6)
"""Rows of a request: in a round of MTP with three steps, and of DSpark with blocks of five."""
STREAMS = {"flash": 4 * 4096, "pro": 4 * 7168}


def cases() -> Iterator[Case]:
    for requests in REQUESTS:
        for rows in ROWS:
            tokens = torch.randint(2, (2, requests, rows), device="cuda")
            starts = torch.randint(1 << 16, (requests,), device="cuda")
            ours = partial(accept_guesses, tokens[0], tokens[1], starts)
            yield Case(
                f"accept_guesses/{requests}x{rows}",
                ours,
                bytes=tokens.nbytes + starts.nbytes + requests * (8 * rows + 24),
                peers={"torch": compared(partial(_accept_by_torch, tokens[0], tokens[1], starts), ours()[0])},
            )
        for model, values in STREAMS.items():
            slots = torch.randperm(2 * requests, device="cuda")[:requests]
            given, kept, by_torch = _left(requests, values), _left(2 * requests, values), _left(2 * requests, values)
            keep_rows(slots, given, kept)
            yield Case(
                f"keep_rows/{model}/{requests}x{values}",
                partial(keep_rows, slots, given, kept),
                bytes=2 * given.streams.nbytes + 48 * requests,
                peers={"torch": compared(partial(_keep_by_torch, slots, given, by_torch), kept.streams[slots])},
            )


def _left(rows: int, values: int) -> Left:
    ids = torch.randint(1000, (2, rows), device="cuda")
    probability = torch.ones(rows, 1, device="cuda")
    return Left(ids[0], ids[1, :, None], probability, torch.randn(rows, values, device="cuda").bfloat16())


def _accept_by_torch(guesses: torch.Tensor, answers: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    return reference.accept_guesses(guesses, answers, starts).lengths


def _keep_by_torch(slots: torch.Tensor, given: Left, kept: Left) -> torch.Tensor:
    """As SGLang does; its streams."""
    for to, rows in zip(kept, given, strict=True):
        to[slots] = rows
    return kept.streams[slots]
