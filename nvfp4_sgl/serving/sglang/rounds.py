"""Launches of SGLang beside the graphs of a round of drafts, for the warm-up. B requests, n rows each."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.cache.layout import PAGE_TOKENS
from nvfp4_sgl.serving.sglang.ledger import find


def find_slots(table: Tensor, requests: Tensor, lengths: Tensor) -> None:
    """The last slots of requests, int64 [B], of so many tokens, int32 [B]; table: int32 [requests, columns]."""
    find("last_slots")(table, requests, lengths)


def write_slots(table: Tensor, requests: Tensor, starts: Tensor, ends: Tensor, slots: Tensor) -> None:
    """Write ``slots``, int64, into the columns from ``starts`` to ``ends``, int32 [B]."""
    find("write_slots")(requests, table, starts, ends, slots, len(requests))


def read_block_slots(table: Tensor, requests: Tensor, lengths: Tensor, rows: int, *, once: bool) -> None:
    """DSpark's slots of a round's rows behind ``lengths``, int64 [B]; ``once``: and positions and the decided token."""
    block = torch.empty(len(requests), rows - 1, dtype=torch.int64, device=table.device)
    find("block_slots")(
        req_pool_indices=requests,
        req_to_token=table,
        start_offset=lengths,
        batch_size=len(requests),
        draft_token_num=rows,
        device=table.device,
        page_size=PAGE_TOKENS,
        positions_out=torch.empty(len(requests), rows, dtype=torch.int64, device=table.device) if once else None,
        anchor_src=lengths if once else None,
        anchor_out=block if once else None,
    )


def read_step_slots(table: Tensor, requests: Tensor, lengths: Tensor, rows: int) -> None:
    """The same of EAGLE's, with the positions of its first step."""
    out = torch.empty(len(requests) * rows, dtype=torch.int64, device=table.device)
    find("step_slots")(requests, table, lengths, out, 1, rows, positions=torch.empty_like(lengths), mrope=None)


def build_chain(
    table: Tensor, requests: Tensor, lengths: Tensor, decided: Tensor, guesses: Tensor, mask: Tensor
) -> None:
    """The rows to verify: ``decided``, int [B], and ``guesses``, int64 [B, n - 1]; the mask is that of the backend."""
    find("build_chain")(
        decided, guesses, lengths, mask, req_pool_indices=requests, req_to_token=table, with_mrope=False
    )


def commit(tokens: Tensor, places: Tensor, accepted: Tensor, lengths: Tensor) -> None:
    """Inputs of the draft's pass behind a verify pass, of tokens and places, int32 [B, n], and accepted, int32 [B]."""
    find("commit_round")(tokens.flatten(), places, accepted, lengths, num_draft_tokens=tokens.shape[1])


def lay_out(lengths: Tensor, rows: int) -> None:
    """Lengths and positions of the draft's pass."""
    find("lay_out_extend")(lengths, rows, False)


def gather(requests: Tensor, hidden: int) -> None:
    """Values that the round before has left for the draft: a guess with its probability, a token and bf16 [hidden]."""
    slots = max(len(requests), 2)
    find("gather_round")(
        requests,
        torch.zeros(slots, 1, device=requests.device),
        torch.zeros(slots, 1, dtype=torch.int64, device=requests.device),
        torch.zeros(slots, dtype=torch.int64, device=requests.device),
        torch.zeros(slots, hidden, dtype=torch.bfloat16, device=requests.device),
    )
