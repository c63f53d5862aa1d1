"""Inboxes in the memory of tensor-parallel ranks, where kernels push parts of sums (:mod:`..common.inbox`)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from nvfp4_sgl.pushed_sums import capacity
from nvfp4_sgl.triton_kernels.common.inbox import SLOTS, empty_inbox
from nvfp4_sgl.weights.parallel import Collective, Exchange, Slot

assert len(Collective) == SLOTS, "a slot for each place of a layer"


def exchange_of(rank: int, inboxes: Sequence[Tensor]) -> Exchange:
    """The exchange of ``rank`` over all ranks' ``inboxes`` as it sees them: int16 [SLOTS, ranks, tokens, d] each."""
    others = [other for other in range(len(inboxes)) if other != rank]
    slots = {}
    for index, place in enumerate(Collective):
        outboxes = [inboxes[other][index, rank].view(torch.bfloat16) for other in (rank, *others)]
        slots[place] = Slot(inboxes[rank][index], outboxes)
    return Exchange(slots, inboxes[rank].shape[2])


def shared_inboxes(group: dist.ProcessGroup, tokens: int, d: int, device: torch.device) -> list[Tensor]:
    """The empty inboxes of all ranks of ``group`` as this rank sees them; all ranks call this.

    Args:
        group: of tensors on the CPU. device: this rank's GPU, which must reach those of the others.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # PyTorch would map a second time what nobody reads
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    shape = (SLOTS, ranks, tokens, d)
    own = symmetric.empty(*shape, dtype=torch.int16, device=device)
    shared = symmetric.rendezvous(own, group)
    assert not shared.offset, "PyTorch gives each tensor an allocation of its own"
    own.copy_(empty_inbox(ranks, tokens, d, device))
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody sends before every inbox is empty
    return [own if rank == here else shared.get_buffer(rank, shape, torch.int16) for rank in range(ranks)]


def lone_exchange(ranks: int, d: int, device: torch.device) -> Exchange | None:
    """The exchange of a rank without others, which sends to itself for all; ``None`` if ``ranks`` ranks push nothing.

    It launches what a rank launches, and waits for nobody.
    """
    tokens = capacity(ranks)
    if not tokens:
        return None
    slots = {}
    for place in Collective:
        parts = empty_inbox(ranks, tokens, d, device)[0]
        slots[place] = Slot(parts, [*parts.view(torch.bfloat16)])
    return Exchange(slots, tokens)
