"""Steps around a round that SGLang does by kernels, for a chain of drafts on the CPU, in torch.

SGLang drafts trees. With top-k 1 a tree is a chain of n rows a request: row 0 is the last token that is decided, row i
the i-th guess, at positions L, L + 1, ... Arguments are those of the functions that these hooks stand around.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def build_tree(
    original: Callable[..., None],
    parents: Tensor,
    scores: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    steps: int,
    rows: int,
    mask_mode: Any,
) -> None:
    """Fill the tensors by which SGLang walks a tree of guesses; ours is a chain of ``rows`` tokens a request.

    Args:
        lengths: [B], the position of each request's first row.
        mask: left as it is, since nothing reads it.
        positions: [B * rows], written: the position of each row.
        index, next_token, next_sibling: [B, rows], written: the row's place in the batch, the row that follows it
            within its request, -1 for none, and -1.
    """
    requests = len(lengths)
    places = torch.arange(requests * rows).view(requests, rows)
    positions.copy_((lengths[:, None] + torch.arange(rows)).flatten())
    index.copy_(places)
    next_token.copy_(torch.arange(1, rows + 1).where(torch.arange(1, rows + 1) < rows, -1).expand(requests, rows))
    next_sibling.fill_(-1)


def draft_slots(
    original: Callable[..., None],
    requests: Tensor,
    table: Tensor,
    lengths: Tensor,
    out: Tensor,
    topk: int,
    columns: int,
    positions: Tensor | None = None,
    mrope: Tensor | None = None,
) -> None:
    """Write the slots of the ``columns`` tokens after each request's ``lengths`` to ``out`` [B * columns]."""
    out.copy_(_slots(table, requests, lengths, topk * columns).flatten())
    if positions is not None:
        positions.copy_(lengths)


def cache_locs(
    *,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> Tensor:
    """Slots of the tokens of a verify pass, int64 [B * draft_token_num]."""
    return _slots(req_to_token, req_pool_indices, start_offset, draft_token_num).flatten()


def _slots(table: Tensor, requests: Tensor, lengths: Tensor, count: int) -> Tensor:
    columns = lengths.long()[:, None] + torch.arange(count)
    return table[requests.long()[:, None], columns].long()


def bonus_tokens(
    original: Callable[..., None], accepted: Tensor, lengths: Tensor, out: Tensor, stride: int, requests: int
) -> None:
    """Write the last accepted token of each request to ``out`` [B]; ``accepted`` has B * stride elements."""
    out.copy_(accepted.view(requests, stride).gather(1, lengths.long()[:, None] - 1)[:, 0])


def write_slots(
    original: Callable[..., None],
    requests: Tensor,
    table: Tensor,
    starts: Tensor,
    ends: Tensor,
    slots: Tensor,
    count: int,
) -> None:
    """Write ``slots``, request after request, into columns ``starts`` to ``ends`` of their rows of ``table``."""
    counts = (ends - starts).long()
    owner = torch.repeat_interleave(torch.arange(count), counts)
    within = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]
    table[requests.long()[owner], starts.long()[owner] + within] = slots.to(table.dtype)


def last_slots(original: Callable[..., Tensor], table: Tensor, requests: Tensor, lengths: Tensor) -> Tensor:
    """Slot of the last of each request's ``lengths`` tokens; -1 where there is none."""
    slots = table[requests.long(), lengths.long() - 1].long()
    return torch.where(lengths > 0, slots, -1)


def select_guess(
    original: Callable[..., Any], i: int, p: Tensor, index: Tensor, hidden: Tensor, scores: Tensor | None, topk: int
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Ids [B] and streams that step i reads: in a chain, those of the step before."""
    return index.flatten(), hidden, p, (p[:, None], index, torch.full_like(index, i))


def keep_rows(original: Callable[..., None], pool: Any, *args: Any) -> None:
    """Nothing: our compressors read no row of a rejected token (:mod:`nvfp4_sgl.cache.plan`)."""
