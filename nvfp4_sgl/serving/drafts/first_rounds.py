"""Compiles, before the server is ready, what the first rounds of drafts on a GPU would otherwise wait for.

Beside its graphs a round launches Triton kernels, which are compiled at their first call: ours, which accept and keep
(:mod:`nvfp4_sgl.triton_kernels.logits.accept`, :mod:`nvfp4_sgl.triton_kernels.plan.relay`), and SGLang's. Those that
give slots to requests are compiled again for powers of two of requests; the others take any number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.serving import first_requests
from nvfp4_sgl.serving.drafts.dspark_checks import INPUTS_ONCE
from nvfp4_sgl.serving.sglang import rounds, scheduling, settings
from nvfp4_sgl.triton_kernels.logits import accept
from nvfp4_sgl.triton_kernels.plan.relay import Left, keep_rows

REQUESTS = 2
"""Requests of a round that stands for all, where kernels take any number."""


@torch.no_grad()
def warm_up(scheduler: Any) -> None:
    """Run the kernels around a round, on values that nobody reads; a CPU has none.

    Args:
        scheduler: SGLang's ``Scheduler``, which has no request yet.
    """
    if torch.device(scheduler.device).type != "cuda":
        return
    most, runner = int(scheduler.max_running_requests), scheduler.tp_worker.model_runner
    table = torch.zeros_like(scheduler.req_to_token_pool.req_to_token[:1])  # kernels are compiled for its columns
    first_requests.allocate(scheduling.page_allocator(scheduler), table.device, most, drafted=True)
    give_slots(table, most)
    config = runner.model.model_config
    if settings.drafts_blocks():
        verify_block(table, settings.round_tokens())
    else:
        mask = runner.attn_backend.verify_mask.buffer
        verify_chain(table, settings.round_tokens(), mask, config.hc_mult * config.hidden_size)


def give_slots(table: Tensor, most: int) -> None:
    """Find and write slots of up to ``most`` requests in ``table``, int32 [1, columns]."""
    for requests in sorted({*first_requests.ROWS, *first_requests.sizes(most)}):
        owners = torch.zeros(requests, dtype=torch.int64, device=table.device)
        none = torch.zeros(requests, dtype=torch.int32, device=table.device)
        rounds.find_slots(table, owners, none)
        rounds.write_slots(table, owners, none, none.clone(), owners.clone())


def verify_block(table: Tensor, rows: int) -> None:
    """Around the verify pass of a round of DSpark's, of ``rows`` rows a request."""
    owners, lengths, tokens = _round(table, rows)
    rounds.read_block_slots(table, owners, lengths, rows, once=settings.environment_flag(INPUTS_ONCE))
    accept.accept_guesses(tokens, tokens, lengths)


def verify_chain(table: Tensor, rows: int, mask: Tensor, hidden: int) -> None:
    """Around the passes of a round of EAGLE's.

    Args:
        mask: of the target's backend. hidden: values of a token's streams.
    """
    owners, lengths, tokens = _round(table, rows)
    streams = torch.zeros(len(owners), hidden, dtype=torch.bfloat16, device=table.device)
    rounds.gather(owners, hidden)
    rounds.read_step_slots(table, owners, lengths, rows)
    for dtype in (torch.int64, torch.int32):  # behind a prompt, and behind a round
        rounds.build_chain(table, owners, lengths, owners.to(dtype), tokens[:, 1:].contiguous(), mask)
    accepted, _, places, answers, _, _ = accept.accept_guesses(tokens, tokens, lengths)
    kept = Left(lengths, lengths[:, None], torch.ones(len(owners), 1, device=table.device), streams)
    for token in (lengths, accepted):
        keep_rows(torch.arange(len(owners), device=table.device), Left(token, *kept[1:]), kept)
    rounds.commit(answers, places, accepted, lengths)
    rounds.lay_out(lengths, rows)


def _round(table: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(int64 [B], requests; int64 [B], their lengths; int64 [B, rows], tokens)."""
    owners = torch.zeros(REQUESTS, dtype=torch.int64, device=table.device)
    return owners, torch.zeros_like(owners), owners.new_zeros(REQUESTS, rows)
