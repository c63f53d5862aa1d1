"""A sum over ranks inside an mHC site: each rank pushes its part of a sublayer's output into every rank's memory.

The site's mixers, which read the sublayer's output anyway, exchange it, each the columns that it mixes. A mixer stores
its rank's part in the inboxes of all ranks, its own too, and then reads its own inbox until every rank's part is there.
So there is one launch less than with an all-reduce of its own, the next kernel can overlap with the site, and a part
crosses between the GPUs once, in one direction.

Parts say themselves that they are there: an inbox holds EMPTY, the bits of -0.0, where nothing has come. A sender makes
+0.0 of -0.0, and a reader leaves EMPTY behind. A bf16 value is never torn, so no flag and no order of stores is needed.

Consecutive sites use the two slots by turns. Nobody writes into a slot that is still read: a rank sends to a slot again
two sites later, after it has received all parts of the site between, and a rank sends those only after its kernel that
read the slot has ended. All ranks must run the same sites in the same order.

Sums are those of the ranks' parts in fp32, rounded once to bf16, in an order that is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_sgl.errors import OperandValueError
from nvfp4_sgl.formats.checks import require_contiguous, require_dtype, require_same_device, require_shape

from ..common.rounding import round_to_bf16, widen

SLOTS = 2
EMPTY = tl.constexpr(-0x8000)
"""The bits of a bf16 -0.0, as int16."""
RANK_COUNTS = (2, 4, 8)
"""Numbers of ranks that can exchange: a tile of the kernel has a power of two."""


@dataclass(frozen=True)
class Slot:
    """Where the parts of one site's sum meet.

    Attributes:
        inbox: int16 [ranks, tokens, d], contiguous, in this rank's memory: the bits of every rank's part.
        outboxes: int16 [tokens, d] for each rank, contiguous: this rank's rows of that rank's inbox.
    """

    inbox: Tensor
    outboxes: Sequence[Tensor]

    def check(self, op: str, output: Tensor) -> None:
        """:class:`OperandError` unless parts like ``output``, [T, d], can be exchanged here."""
        tokens, d = output.shape
        ranks = len(self.outboxes)
        require_dtype(f"{op}: output", output, torch.bfloat16)
        require_dtype(f"{op}: inbox", self.inbox, torch.int16)
        if ranks not in RANK_COUNTS or self.inbox.dim() != 3 or self.inbox.shape[1] < tokens:
            raise OperandValueError(
                f"{op}: inbox: expected [ranks, at least {tokens} tokens, {d}] for {ranks} ranks, of which there may be"
                f" {RANK_COUNTS}, found {tuple(self.inbox.shape)}"
            )
        require_shape(f"{op}: inbox", self.inbox, (ranks, self.inbox.shape[1], d), "[ranks, tokens, d]")
        require_contiguous(f"{op}: inbox", self.inbox)
        require_same_device("output", output, **{f"{op}: inbox": self.inbox})
        for rank, outbox in enumerate(self.outboxes):
            name = f"{op}: outbox of rank {rank}"
            require_dtype(name, outbox, torch.int16)
            require_shape(name, outbox, (self.inbox.shape[1], d), "[tokens, d]")
            require_contiguous(name, outbox)
            require_same_device("output", output, **{name: outbox})

    def arguments(self) -> tuple[Tensor, ...]:
        """The tensors as the kernel takes them."""
        return self.inbox, *self.outboxes


def empty_inbox(ranks: int, tokens: int, d: int, device: torch.device | str) -> Tensor:
    """An int16 [SLOTS, ranks, tokens, d] that holds nothing yet: what a rank shares with the others."""
    return torch.full((SLOTS, ranks, tokens, d), EMPTY.value, dtype=torch.int16, device=device)


def slots(rank: int, inboxes: Sequence[Tensor]) -> list[Slot]:
    """The slots of ``rank``: ``inboxes`` are those of all ranks, int16 [SLOTS, ranks, tokens, d], as it sees them."""
    return [Slot(inboxes[rank][slot], [inbox[slot, rank] for inbox in inboxes]) for slot in range(SLOTS)]


@triton.jit
def send(output, exchange, at, mask):
    """Store this rank's part, bf16 at ``output + at``, in the inboxes of all ranks."""
    part = tl.load(output + at, mask=mask, other=0.0).to(tl.int16, bitcast=True)
    part = tl.where(part == EMPTY, 0, part).to(tl.int16)
    for rank in tl.static_range(1, len(exchange)):
        tl.store(exchange[rank] + at, part, mask=mask)


@triton.jit
def receive(exchange, tokens, d, at, mask):
    """Wait for all ranks' parts and return their sum, rounded to bf16, in fp32; ``at``, ``mask``: as of :func:`send`.

    A tile has at least as many values as the program has threads, so that no two threads read the same value: they
    could disagree on whether it is there.
    """
    RANKS: tl.constexpr = len(exchange) - 1
    rank = tl.arange(0, RANKS)[:, None, None].to(tl.int64)
    place = exchange[0] + rank * (tokens * d) + at[None, :, :]
    inside = (rank >= 0) & mask[None, :, :]
    parts = tl.load(place, mask=inside, other=0, volatile=True)
    while tl.max((parts == EMPTY).to(tl.int32)) > 0:
        parts = tl.load(place, mask=inside, other=0, volatile=True)
    tl.store(place, tl.full(place.shape, EMPTY, tl.int16), mask=inside)
    return round_to_bf16(tl.sum(widen(parts.to(tl.bfloat16, bitcast=True)), axis=0))
