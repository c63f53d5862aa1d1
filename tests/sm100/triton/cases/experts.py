"""Routing with its permutation, SwiGLU and copies of rows, the sum of a token's experts, and slots of a pass."""

from __future__ import annotations

import torch

from nvfp4_sgl.triton_kernels.common.inbox import EMPTY
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.rounded_swiglu import swiglu_to_nvfp4
from nvfp4_sgl.triton_kernels.experts.router_logits import router_logits, semaphores_size
from nvfp4_sgl.triton_kernels.experts.routing import route_hash, route_topk
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows, swiglu
from nvfp4_sgl.triton_kernels.plan.resolve import Plan
from tests.sm100.triton.cases.case import Outputs, case, close, next_codes
from tests.sm100.triton.cases.rows import BF16, some_rows
from tests.triton import test_metadata, test_rounded_swiglu
from tests.triton.support.interpreter import mapped
from tests.triton.test_routing import poisoned

SCALING = 2.5
ROUTED = close(2.0**-21)
"""Bound for routing weights: softplus, a root and a sum of six."""


def routes_of(out: Routes, semaphore: torch.Tensor) -> Outputs:
    found = {name: getattr(out, name) for name in ("experts", "weights", "source_row", "destination", "offsets")}
    return {**found, "counts": out.counts, "semaphore": semaphore}


def route(tokens: int, experts: int, topk: int, tile: int, *, first_slot: int = 255) -> Outputs:
    generator = torch.Generator().manual_seed(experts)
    logits = (torch.randn(tokens, experts, generator=generator) * 3).bfloat16()
    bias, semaphore = torch.randn(experts, generator=generator), torch.zeros(1, dtype=torch.int32)
    out = poisoned(tokens, topk + 1, experts + 1, tile, "cpu")
    slots = torch.arange(first_slot, first_slot + tokens, dtype=torch.int32)  # below 256: padding
    route_topk(logits, bias, SCALING, out, semaphore, shared_expert=True, window_write=slots)
    return routes_of(out, semaphore)


def logits(tokens: int, experts: int, width: int) -> Outputs:
    torch.manual_seed(8)
    x, weight = torch.randn(tokens, width).bfloat16(), (torch.randn(experts, width) / 8).bfloat16()
    semaphores = torch.zeros(semaphores_size(experts), dtype=torch.int32)
    return {"logits": router_logits(x, weight, semaphores), "semaphores": semaphores}


@case("_router_logits", bounds={"logits": close(0.0, 2.0**-15)})
def logits_of_experts() -> Outputs:
    return logits(2, 7, 600)


@case("_router_logits_split", bounds={"logits": close(0.0, 2.0**-15)})
def logits_of_parts_of_k() -> Outputs:
    return logits(9, 20, 1100)


@case("_router_logits_split", bounds={"logits": close(0.0, 2.0**-15)})
def logits_of_many_tokens() -> Outputs:
    """More than one program takes."""
    return logits(35, 7, 600)


@case("_route_topk", bounds={"weights": ROUTED})
def routed_tokens() -> Outputs:
    return route(5, 150, 6, 8)


@case("_route_topk", bounds={"weights": ROUTED})
def a_routed_token() -> Outputs:
    return route(1, 150, 6, 8, first_slot=256)


@case("_route_topk", "_scan", "_place", bounds={"weights": ROUTED})
def many_routed_tokens() -> Outputs:
    """Counted, scanned and placed by launches of their own."""
    return route(259, 9, 2, 128)


@case("_route_hash", bounds={"weights": ROUTED})
def tokens_routed_by_table() -> Outputs:
    generator = torch.Generator().manual_seed(3)
    logits, semaphore = torch.randn(4, 12, generator=generator) * 3, torch.zeros(1, dtype=torch.int32)
    table = torch.stack([torch.randperm(12, generator=generator)[:3] for _ in range(50)]).int()
    out = poisoned(4, 4, 13, 8, "cpu")
    ids = torch.tensor([49, 0, 50, 7])  # 50 is unknown
    slots = torch.tensor([256, 511, 9999, 0], dtype=torch.int32)  # the last token is padding
    route_hash(logits, table, ids, SCALING, out, semaphore, shared_expert=True, window_write=slots)
    return routes_of(out, semaphore)


@case("_finalize", bounds={"out": BF16})
def sum_of_experts() -> Outputs:
    generator = torch.Generator().manual_seed(4)
    destination = torch.randperm(24, generator=generator)[:18].view(3, 6).int()
    rows = torch.full((24, 72), torch.nan)
    rows[destination.long()] = torch.randn(3, 6, 72, generator=generator)
    destination[0, 2] = -1
    weights, shared = torch.rand(3, 6, generator=generator), some_rows(3, 72).bfloat16()
    out = torch.full((3, 72), torch.nan, dtype=torch.bfloat16)
    return {"out": finalize(rows.bfloat16(), destination, weights, out, shared=shared)}


@case("_finalize")
def sum_of_experts_for_four_ranks() -> Outputs:
    """With NaNs of any bits."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(6, 72, generator=generator)
    rows.view(torch.int32)[0, ::3] = -1
    rows[1, 1::9] = torch.inf
    destination = torch.randperm(6, generator=generator).view(3, 2).int()
    out, *copies = (torch.full((3, 72), torch.nan, dtype=torch.bfloat16) for _ in range(4))
    mapped(copies)
    finalize(rows, destination, None, out, copies=copies)
    assert not any((one.view(torch.int16) == EMPTY.value).any() for one in (out, *copies))
    return {"out": out, **{f"copy {number}": copy for number, copy in enumerate(copies)}}


@case("_swiglu", bounds={"out": BF16})
def clamped_swiglu() -> Outputs:
    gate_up = some_rows(3, 400)
    gate_up[0, :4] = torch.tensor([-1e30, -0.0, 88.0, torch.nan])
    out = torch.full((3, 203), torch.nan, dtype=torch.bfloat16)
    swiglu(gate_up.bfloat16(), 10.0, out[:, :200])
    return {"out": out}


@case("_swiglu_to_nvfp4", bounds={"out": next_codes(0.01)})
def swiglu_rounded_to_nvfp4() -> Outputs:
    routes = test_rounded_swiglu.routed("cpu")
    sums, scale, alpha = test_rounded_swiglu.inputs(192, len(routes.source_row))
    out = torch.full((len(sums), 192), torch.nan, dtype=torch.bfloat16)
    swiglu_to_nvfp4(sums, scale, alpha, routes, 10.0, test_rounded_swiglu.SCALE, out)
    return {"out": out.view(torch.int16)}


@case("_scatter")
def copies_of_rows() -> Outputs:
    destination = torch.tensor([[6, 0], [-1, 3], [9, 1], [-1, -1], [8, 2]], dtype=torch.int32)
    out = torch.full((10, 2504), torch.inf)
    scatter_rows(some_rows(5, 2500), destination, out[:, :2500])
    return {"out": out}


def plan_of(plan: Plan) -> Outputs:
    names = ("window_write", "window_slots", "window_lengths", "entry_slots", "entry_lengths")
    found = {name: getattr(plan, name) for name in names}
    return {**found, **{name: getattr(plan.batch, name) for name in ("owners", "starts", "bounds", "pages")}}


@case("_split", "_resolve")
def slots_of_a_decode_step() -> Outputs:
    starts, ends = test_metadata.CASES["decode"]
    return plan_of(test_metadata.device_plan(test_metadata.sequences(starts, ends), "cpu", longest=1024, decode=True))


@case("_split", "_resolve")
def slots_of_chunks() -> Outputs:
    batch = test_metadata.sequences([64, 10, 3, 300], [65, 10, 5, 310])
    return plan_of(test_metadata.device_plan(batch, "cpu", longest=1024, decode=False))
