"""Routing, permutation and the final sum of experts, at the shapes of Flash and Pro."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from nvfp4_sgl.triton_kernels import routing

from . import Case, Peer

MODELS = {"flash": (4096, 256), "pro": (7168, 384)}
TOKENS = (1, 8, 64, 256, 8192)
TOPK = 6


def cases() -> Iterator[Case]:
    """With the shared expert as a group of its own."""
    for model, (d, count) in MODELS.items():
        for tokens in TOKENS:
            shape = f"{model}/{tokens}x{count}"
            logits = torch.randn(tokens, count, device="cuda")
            bias = torch.randn(count, device="cuda")
            experts, weights = routing.route_topk(logits, bias, TOPK, 2.5, shared_expert=True)
            chosen = experts.nbytes + weights.nbytes
            yield Case(
                f"route_topk/{shape}",
                partial(
                    routing.route_topk, logits, bias, TOPK, 2.5, shared_expert=True, experts=experts, weights=weights
                ),
                bytes=logits.nbytes + chosen,
                peers={"torch.topk alone": Peer(partial(torch.topk, logits, TOPK, sorted=False), part=True)},
            )
            table = torch.randint(count, (129280, TOPK), device="cuda", dtype=torch.int32)
            ids = torch.randint(len(table), (tokens,), device="cuda")
            yield Case(
                f"route_hash/{shape}",
                partial(
                    routing.route_hash, logits, table, ids, 2.5, shared_expert=True, experts=experts, weights=weights
                ),
                bytes=2 * chosen + ids.nbytes,
            )
            routing.route_topk(logits, bias, TOPK, 2.5, shared_expert=True, experts=experts, weights=weights)
            tile = 8 if tokens <= 64 else 128
            place = routing.Permutation.allocate(tokens, TOPK + 1, count + 1, tile, "cuda")
            yield Case(
                f"permute/{shape}",
                partial(routing.permute, experts, tile, place),
                bytes=2 * experts.nbytes + place.source_row.nbytes + place.offsets.nbytes + place.counts.nbytes,
                peers={"torch.sort alone": Peer(partial(torch.sort, experts.view(-1), stable=True), part=True)},
            )
            routing.permute(experts, tile, place)
            rows = torch.randn(place.source_row.numel(), d, device="cuda", dtype=torch.bfloat16)
            out = rows.new_empty(tokens, d)
            yield Case(
                f"finalize/{model}/{tokens}x{TOPK + 1}x{d}",
                partial(routing.finalize, rows, place.destination, weights, out),
                bytes=out.nbytes * (TOPK + 2),
            )
