"""Sites of hyper-connections: by mma.sync and, from 64 tokens of a block on, by tcgen05."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import torch

from nvfp4_sgl.formats import checks
from nvfp4_sgl.triton_kernels.common.inbox import Inbox, empty_inbox
from nvfp4_sgl.triton_kernels.hyper_connection import site as kernels
from nvfp4_sgl.triton_kernels.hyper_connection import tiling as tilings
from nvfp4_sgl.triton_kernels.hyper_connection.site import SiteState
from tests.sm100.triton.cases.case import Outputs, case, close, next_codes
from tests.sm100.triton.cases.rows import BF16, outputs_of
from tests.triton.support.rows import poisoned_rows
from tests.triton.test_hyper_connection import make_site, make_streams, poisoned_state

COEFFICIENT = close(0.0, 2.0**-20)
"""Bound for post and comb: sums of 4 d products, sigmoid or softmax with Sinkhorn."""
NEAR = {"x": BF16, "post": COEFFICIENT, "comb": COEFFICIENT, "streams": BF16}


def state_of(state: SiteState) -> Outputs:
    found = {"x": state.x, "post": state.post, "comb": state.comb, "semaphores": state.semaphores}
    return found if state.quantized is None else {**found, **outputs_of(state.quantized)}


@case("site_kernel", bounds=NEAR)
def first_site() -> Outputs:
    torch.manual_seed(3)
    site, streams, state = make_site(40, "cpu"), make_streams(3, 40, "cpu"), poisoned_state(3, 40, "cpu")
    kernels.hyper_connection_pre(site, streams, state)
    return state_of(state)


@case("site_kernel", bounds={**NEAR, "codes": next_codes(0.01), "block_scales": next_codes(0.01), "scale": BF16})
def next_site_quantised() -> Outputs:
    torch.manual_seed(4)
    site, streams, state = make_site(128, "cpu"), make_streams(5, 128, "cpu"), poisoned_state(5, 128, "cpu")
    state = replace(state, quantized=poisoned_rows(5, 128, "cpu", token_tile=8))
    state.post.copy_(torch.rand(5, 4) * 2)
    state.comb.copy_(torch.rand(5, 4, 4) / 2)
    output, out = torch.randn(5, 128).bfloat16(), torch.full_like(streams, torch.nan)
    kernels.hyper_connection_next(site, output, streams, state, out=out)
    return {**state_of(state), "streams": out}


@case("site_kernel", bounds={"x": BF16, "streams": BF16})
def last_collapse() -> Outputs:
    torch.manual_seed(5)
    site, streams = make_site(72, "cpu", head=True), make_streams(2, 72, "cpu")
    state = poisoned_state(2, 72, "cpu")
    state.post.copy_(torch.rand(2, 4) * 2)
    state.comb.copy_(torch.rand(2, 4, 4) / 2)
    out = torch.full_like(streams, torch.nan)
    kernels.hyper_connection_next(site, torch.randn(2, 72), streams, state, out=out)
    return {**state_of(state), "streams": out}


def parts_of_ranks(ranks: int, tokens: int, d: int) -> torch.Tensor:
    """An inbox that has room for two tokens more, as int16."""
    inbox = empty_inbox(ranks, tokens + 2, d, "cpu")[0]
    parts = torch.randn(ranks, tokens, d).bfloat16()
    parts[:, :, ::5] = -0.0
    inbox[:, :tokens] = parts.view(torch.int16)
    return inbox


def site_that_adds(ranks: int, tokens: int, d: int, head: bool) -> Outputs:
    site, streams = make_site(d, "cpu", head=head), make_streams(tokens, d, "cpu")
    state, inbox = poisoned_state(tokens, d, "cpu"), parts_of_ranks(ranks, tokens, d)
    state.post.copy_(torch.rand(tokens, 4) * 2)
    state.comb.copy_(torch.rand(tokens, 4, 4) / 2)
    out = torch.full_like(streams, torch.nan)
    kernels.hyper_connection_next(site, Inbox(inbox), streams, state, out=out)
    return {**state_of(state), "streams": out, "inbox": inbox}


@case("site_kernel", bounds=NEAR)
def site_that_adds_two_parts() -> Outputs:
    torch.manual_seed(9)
    return site_that_adds(2, 3, 72, head=False)


@case("site_kernel", bounds={"x": BF16, "streams": BF16})
def last_collapse_that_adds_four_parts() -> Outputs:
    torch.manual_seed(10)
    return site_that_adds(4, 2, 40, head=True)


@case("site_kernel", bounds=NEAR)
def site_that_adds_in_several_steps() -> Outputs:
    """The loop is pipelined, and a thread has eight values."""
    torch.manual_seed(11)
    tiling = replace(tilings.choose_tiling(64), programs=2, span=64)
    with mock.patch.object(tilings, "TILINGS", ((None, tiling),)):
        checks.forget()
        found = site_that_adds(2, 5, 200, head=False)
        checks.forget()
    return found


@case("_post", bounds={"streams": BF16})
def streams_alone() -> Outputs:
    torch.manual_seed(6)
    streams = make_streams(3, 200, "cpu")
    post, comb = torch.rand(3, 4) * 2, torch.rand(3, 4, 4) / 2
    out = torch.full_like(streams, torch.nan)
    return {"streams": kernels.hyper_connection_post(torch.randn(3, 200).bfloat16(), streams, post, comb, out=out)}


@case("site_kernel", bounds=NEAR)
def site_of_large_blocks() -> Outputs:
    """tcgen05, several steps of a pipelined loop, followers that wait for other programs."""
    torch.manual_seed(7)
    tiling = replace(tilings.TILINGS[-1][1], programs=2, span=64)
    site, streams, state = make_site(200, "cpu"), make_streams(5, 200, "cpu"), poisoned_state(5, 200, "cpu")
    with mock.patch.object(tilings, "TILINGS", ((None, tiling),)):
        checks.forget()
        kernels.hyper_connection_pre(site, streams, state)
        checks.forget()
    return state_of(state)


@case("site_kernel", bounds=NEAR, full=True)
def site_of_many_tokens() -> Outputs:
    torch.manual_seed(8)
    site, streams, state = make_site(256, "cpu"), make_streams(270, 256, "cpu"), poisoned_state(270, 256, "cpu")
    kernels.hyper_connection_pre(site, streams, state)
    return state_of(state)
