"""How a server sums over tensor-parallel ranks: SGLang's all-reduce, and inside mHC sites where GPUs can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_sgl.serving import sglang_private as private
from nvfp4_sgl.weights.parallel import Collective, PartialSum

Sum = Callable[[Collective, Tensor], Tensor | PartialSum]


@dataclass(frozen=True)
class RankSums:
    """What was chosen: the ``all_reduce`` of ``TensorParallel``, and what it is in words."""

    all_reduce: Sum
    words: str


def with_sites(all_reduce: Sum, width: int, device: torch.device) -> RankSums:
    """``all_reduce``, but passes that are small enough leave their sums to the sites; all ranks call this.

    Only where SGLang's own all-reduce goes through the memory of other GPUs: it has checked that all can reach it, and
    ``--disable-custom-all-reduce`` turns both off.

    Args:
        all_reduce: SGLang's. width: values of a token's sum.
    """
    ranks = private.tp_size()
    if device.type != "cuda" or ranks == 1 or not private.has_peer_all_reduce():
        return RankSums(all_reduce, "by SGLang's all-reduce" if ranks > 1 else "of one rank")
    # Kernels and symmetric memory are for GPUs alone.
    from nvfp4_sgl.targets.fused.peer_sums import PeerSums, exchanged_tokens, shared_inboxes

    tokens = exchanged_tokens(ranks, width)
    if not tokens:
        return RankSums(all_reduce, f"by SGLang's all-reduce: sites cannot sum over {ranks} ranks")
    inboxes = shared_inboxes(private.tp_cpu_group(), tokens, width, device)
    words = f"inside mHC sites up to {tokens} tokens, beyond by SGLang's all-reduce"
    return RankSums(PeerSums.of(private.tp_rank(), inboxes, all_reduce), words)
