"""Sums over tensor-parallel ranks inside mHC sites: which passes have them, and where the ranks' parts meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from nvfp4_sgl.triton_kernels.hyper_connection.exchange import EMPTY, RANK_COUNTS, SLOTS, Slot, empty_inbox, slots
from nvfp4_sgl.weights.parallel import Collective, PartialSum, unsummed

SENT_BYTES = 2**20
"""Most bytes that a rank sends to the others at a site: 128 tokens of 4096 values to one other. As every rank sends its
whole part to every other, an all-reduce in two steps moves less from some size on."""
OF_PLACE = {Collective.ATTENTION_OUTPUT: 0, Collective.EXPERT_OUTPUT: 1}
"""The slot of each place. Places take turns, so slots do."""
assert len(OF_PLACE) == SLOTS


def exchanged_tokens(ranks: int, d: int) -> int:
    """Tokens of the largest pass whose sites sum over ``ranks`` ranks; 0 for a number of ranks that cannot."""
    return SENT_BYTES // (2 * d * (ranks - 1)) if ranks in RANK_COUNTS else 0


def shared_inboxes(group: dist.ProcessGroup, tokens: int, d: int, device: torch.device) -> list[Tensor]:
    """The inboxes of all ranks, int16 [SLOTS, ranks, tokens, d], empty, as this rank sees them; all ranks call this.

    Args:
        group: the ranks. device: this rank's GPU, which must reach those of the others.
    """
    ranks = dist.get_world_size(group)
    shape = (SLOTS, ranks, tokens, d)
    own = symmetric.empty(*shape, dtype=torch.int16, device=device)
    shared = symmetric.rendezvous(own, group)
    own.fill_(EMPTY.value)
    torch.cuda.synchronize(device)
    dist.barrier(group)  # nobody sends before every inbox is empty
    return [shared.get_buffer(rank, shape, torch.int16) for rank in range(ranks)]


@dataclass(frozen=True)
class PeerSums:
    """An ``all_reduce`` of :class:`~nvfp4_sgl.weights.parallel.TensorParallel` that leaves small sums to the sites.

    Attributes:
        slots: this rank's. otherwise: the sum of what is larger than they are.
    """

    slots: Sequence[Slot]
    otherwise: Callable[[Collective, Tensor], Tensor | PartialSum]

    @classmethod
    def of(
        cls, rank: int, inboxes: Sequence[Tensor], otherwise: Callable[[Collective, Tensor], Tensor | PartialSum]
    ) -> PeerSums:
        """From the inboxes of all ranks, as :func:`empty_inbox` makes them and this rank sees them."""
        return cls(slots(rank, inboxes), otherwise)

    def __call__(self, collective: Collective, part: Tensor) -> Tensor | PartialSum:
        slot = self.slots[OF_PLACE[collective]]
        if part.dtype == torch.bfloat16 and len(part) <= slot.inbox.shape[1]:
            return PartialSum(part, slot)
        return self.otherwise(collective, part)


def standing_in(ranks: int, d: int) -> Callable[[Collective, Tensor], Tensor | PartialSum]:
    """What a rank of a server calls, on the meta device: for passes that find out which kernels they need."""
    tokens = exchanged_tokens(ranks, d)
    if not tokens:
        return unsummed
    return PeerSums.of(0, [empty_inbox(ranks, tokens, d, torch.device("meta")) for _ in range(ranks)], unsummed)
