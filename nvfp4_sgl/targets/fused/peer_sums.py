"""Sums over tensor-parallel ranks inside mHC sites: which passes have them, and where the ranks' parts meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.triton_kernels.hyper_connection.exchange import RANK_COUNTS, SLOTS, Slot, empty_inbox, slots
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
