"""The router's logits, routing with the permutation, and the final sum of experts, at the shapes of Flash and Pro.

Peers: cuBLAS for the logits; for the rest what SGLang's experts call: ``moe_fused_gate`` and ``moe_fused_mul_sum``
(Triton), ``hash_topk`` (compiled by nvcc at its first call) and ``moe_align_block_size`` (AOT) after either.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.peers import compared, foreign, installed
from nvfp4_sgl.targets.fused.gemm_bf16 import multiply
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.router_logits import router_logits, semaphores_size
from nvfp4_sgl.triton_kernels.experts.routing import route_hash, route_topk

from . import Case, Peer, one_after_the_other, relative_error

MODELS = {"flash": (4096, 256), "pro": (7168, 384)}
TOKENS = (1, 8, 64, 256, 8192)
LOGITS_TOKENS = (1, 4, 8, 9, 16, 32, 64)
TOPK, SCALE = 6, 2.5


def cases() -> Iterator[Case]:
    """With the shared expert as a group of its own, and its column in the permutation."""
    for model, (d, count) in MODELS.items():
        yield from _logits(model, d, count)
        for tokens in TOKENS:
            shape = f"{model}/{tokens}x{count}"
            logits = torch.randn(tokens, count, device="cuda")
            bias = torch.randn(count, device="cuda")
            semaphore = torch.zeros(1, dtype=torch.int32, device="cuda")
            out = Routes.allocate(tokens, TOPK + 1, count + 1, 8 if tokens <= 64 else 128, "cuda")
            slots = torch.full((tokens,), 256, device="cuda", dtype=torch.int32)
            route = partial(route_topk, logits, bias, SCALE, out, semaphore, shared_expert=True, window_write=slots)
            route()
            written = sum(tensor.nbytes for tensor in vars(out).values() if isinstance(tensor, torch.Tensor))
            written += slots.nbytes - out.starts.nbytes
            align = _align(out)
            yield Case(
                f"route_topk/{shape}",
                route,
                bytes=logits.nbytes + written,
                peers={
                    "torch.topk alone": Peer(partial(torch.topk, logits, TOPK, sorted=False), part=True),
                    **one_after_the_other(_gate(logits, bias, out.weights), align),
                },
            )
            table = torch.randint(count, (129280, TOPK), device="cuda", dtype=torch.int32)
            ids = torch.randint(len(table), (tokens,), device="cuda")
            hashed = Routes.allocate(tokens, TOPK + 1, count + 1, out.tile, "cuda")
            yield Case(
                f"route_hash/{shape}",
                partial(
                    route_hash, logits, table, ids, SCALE, hashed, semaphore, shared_expert=True, window_write=slots
                ),
                bytes=tokens * TOPK * 8 + ids.nbytes + written,
                peers=one_after_the_other(_hash(logits, ids, table, hashed.weights), _align(hashed)),
            )
            rows = torch.randn(out.source_row.numel(), d, device="cuda", dtype=torch.bfloat16)
            summed = rows.new_empty(tokens, d)
            yield Case(
                f"finalize/{model}/{tokens}x{TOPK + 1}x{d}",
                partial(finalize, rows, out.destination, out.weights, summed),
                bytes=summed.nbytes * (TOPK + 2),
                peers=_weighted_sum(rows, out.destination, out.weights, summed),
            )


def _logits(model: str, d: int, count: int) -> Iterator[Case]:
    """For as many tokens as one launch of ours takes; cuBLAS takes two, the second to add the parts of K."""
    weight = torch.randn(count, d, device="cuda", dtype=torch.bfloat16)
    semaphores = torch.zeros(semaphores_size(count), dtype=torch.int32, device="cuda")
    for tokens in LOGITS_TOKENS:
        x = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
        yield Case(
            f"router_logits/{model}/{tokens}x{count}x{d}",
            partial(router_logits, x, weight, semaphores),
            bytes=x.nbytes + weight.nbytes + 4 * tokens * count,
            peers={
                "cuBLAS": compared(partial(multiply, x, weight, torch.float32), router_logits(x, weight, semaphores))
            },
        )


def _gate(logits: torch.Tensor, bias: torch.Tensor, weights: torch.Tensor) -> dict[str, Peer]:
    """Without the shared expert's column."""
    if not installed("sglang"):
        return {}
    gate = partial(
        foreign("sglang.kernels.ops.moe.moe_fused_gate", "moe_fused_gate"),
        *(logits, bias, TOPK),
        scoring_func="sqrtsoftplus",
        renormalize=True,
        routed_scaling_factor=SCALE,
        apply_routed_scaling_factor_on_output=True,
    )
    return {"sglang moe_fused_gate": Peer(gate, lambda: relative_error(_sorted(gate()[0]), _sorted(weights)))}


def _hash(logits: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, weights: torch.Tensor) -> dict[str, Peer]:
    """Without the shared expert's column and the scaling, which SGLang leaves to the experts' sum."""
    if not installed("sglang"):
        return {}
    choose = partial(foreign("sglang.kernels.ops.moe.dsv4", "hash_topk"), logits, ids, table)
    return {"sglang hash_topk (nvcc)": Peer(choose, lambda: relative_error(SCALE * choose()[0], weights[:, :TOPK]))}


def _sorted(weights: torch.Tensor) -> torch.Tensor:
    """Sorted weights of the routed experts: equal scores may come in any order."""
    return weights[:, :TOPK].sort().values


def _align(out: Routes) -> dict[str, Peer]:
    """SGLang's experts read their rows through the sorted ids, so it writes no inverse."""
    if not installed("sglang", "sgl_kernel"):
        return {}
    align = partial(
        foreign("sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size", "moe_align_block_size"),
        *(out.experts, out.tile, out.groups),
    )

    def error() -> float:
        padded = (out.counts + out.tile - 1) // out.tile * out.tile
        return relative_error(align()[2][:1], padded.sum()[None])

    return {"moe_align_block_size": Peer(align, error)}


def _weighted_sum(
    rows: torch.Tensor, destination: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
) -> dict[str, Peer]:
    """Over rows in the tokens' order, where SGLang's experts leave them."""
    if not installed("sglang"):
        return {}
    function = foreign("sglang.kernels.ops.moe.moe_fused_mul_sum", "moe_fused_mul_sum")
    return {
        "sglang moe_fused_mul_sum": compared(
            partial(function, rows[destination.long()], weights, torch.empty_like(out)), out
        )
    }
