"""Sites that wait for the parts of ranks, as SM100 runs them: parts come while they run, or never."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.triton_kernels.common.inbox import EMPTY, SLOTS, Inbox, empty_inbox
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.hyper_connection.site import hyper_connection_next, hyper_connection_pre
from tests.sm100.emulator import DeadlockError, Options
from tests.sm100.emulator.launch import Launch
from tests.sm100.emulator.warp import Warp
from tests.sm100.support.triton_launch import emulated_triton
from tests.sm100.triton.cases.case import Outputs
from tests.sm100.triton.cases.hyper_connection import parts_of_ranks, state_of
from tests.triton.test_hyper_connection import make_site, make_streams, poisoned_state
from tests.triton.test_inbox import BITS

RANKS, TOKENS, WIDTH, SUMS = 2, 3, 72, 3
SPECIAL = torch.tensor([0, -0x8000, 0x7F80, -0x80, 0x7FFF, 0x7FC0, -2, 0x7F81, 1], dtype=torch.int16)
"""Zeros, infinities, and NaNs that are not EMPTY."""


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("special", [False, True])
def test_bits_of_a_plain_sum(special: bool, ranks: int) -> None:
    torch.manual_seed(4)
    inbox = parts_of_ranks(ranks, TOKENS, WIDTH)
    if special:
        inbox[:, 1, ::2] = SPECIAL[torch.randint(len(SPECIAL), (ranks, WIDTH // 2))]
    total, *others = inbox[:, :TOKENS].view(torch.bfloat16).float()
    for part in others:
        total = total + part
    expected, found = run(total.bfloat16()), run(Inbox(inbox))
    for name, wanted in expected.items():
        assert torch.equal(found[name], wanted), name
    assert bool((inbox == EMPTY.value).all())


def run(output: torch.Tensor | Inbox, options: Options | None = None) -> Outputs:
    """What a site leaves, as bits."""
    torch.manual_seed(3)
    site, streams = make_site(WIDTH, "cpu"), make_streams(TOKENS, WIDTH, "cpu")
    state = poisoned_state(TOKENS, WIDTH, "cpu")
    state.post.copy_(torch.rand(TOKENS, 4) * 2)
    state.comb.copy_(torch.rand(TOKENS, 4, 4) / 2)
    with emulated_triton(options):
        hyper_connection_next(site, output, streams, state)
    return {name: found.view(BITS[found.dtype]) for name, found in {**state_of(state), "streams": streams}.items()}


def test_launches_of_senders_and_receivers_overlap() -> None:
    """Three sums of two ranks, in one stream: slots are used again, and nothing is touched too early."""
    torch.manual_seed(5)
    site, destination = make_site(WIDTH, "cpu"), torch.arange(TOKENS, dtype=torch.int32).view(TOKENS, 1)
    weights = [torch.rand(TOKENS, 1) * 4 for _ in range(RANKS)]
    streams = [make_streams(TOKENS, WIDTH, "cpu")] * (RANKS + 1)
    streams, states = [one.clone() for one in streams], [poisoned_state(TOKENS, WIDTH, "cpu") for _ in streams]
    inboxes = [empty_inbox(RANKS, TOKENS + 5, WIDTH, "cpu") for _ in range(RANKS)]
    with emulated_triton():
        for one, state in zip(streams, states, strict=True):
            hyper_connection_pre(site, one, state)
        for _ in range(SUMS):
            rows, out = states[RANKS].x, torch.empty(TOKENS, WIDTH, dtype=torch.bfloat16)
            first, last = (finalize(rows, destination, each, out).float() for each in weights)
            hyper_connection_next(site, (first + last).bfloat16(), streams[RANKS], states[RANKS])
    with emulated_triton(Options(overlap=True)) as emulator:
        emulator.mapped += inboxes
        for number in range(SUMS):
            slot = number % SLOTS
            for rank, state in enumerate(states[:RANKS]):
                own, other = (inboxes[to][slot, rank, :TOKENS].view(torch.bfloat16) for to in (rank, 1 - rank))
                finalize(state.x, destination, weights[rank], own, copies=[other])
            for rank, state in enumerate(states[:RANKS]):
                hyper_connection_next(site, Inbox(inboxes[rank][slot]), streams[rank], state)
    for rank in range(RANKS):
        assert torch.equal(streams[rank], streams[RANKS]) and torch.equal(states[rank].x, states[RANKS].x)
        assert bool((inboxes[rank] == EMPTY.value).all())


@pytest.mark.parametrize("options", [Options(), Options(mode="random", seed=7, backwards=True)], ids=["", "shuffled"])
def test_parts_that_come_while_a_site_waits(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value by value, in any order."""
    torch.manual_seed(1)
    inbox = parts_of_ranks(RANKS, TOKENS, WIDTH)
    expected = run(Inbox(inbox.clone()))
    places = (inbox.view(-1) != EMPTY.value).nonzero().view(-1)
    places, turn = places[torch.randperm(len(places))].tolist(), Launch.turn
    late = torch.full_like(inbox, EMPTY.value)

    def deliver(launch: Launch, warp: Warp, budget: int) -> None:
        for _ in range(min(4, len(places))):
            place = places.pop()
            late.view(-1)[place] = inbox.view(-1)[place]
        turn(launch, warp, budget)

    monkeypatch.setattr(Launch, "turn", deliver)
    found = run(Inbox(late), options)
    assert not places and bool((late == EMPTY.value).all())
    for name, wanted in expected.items():
        assert torch.equal(found[name], wanted), name


def test_a_site_waits_for_each_value() -> None:
    torch.manual_seed(2)
    whole = parts_of_ranks(RANKS, TOKENS, WIDTH)
    for rank, token, column in ((0, 0, 0), (1, 2, WIDTH - 1), (1, 1, 35)):
        inbox = whole.clone()
        inbox[rank, token, column] = EMPTY.value
        with pytest.raises(DeadlockError):
            run(Inbox(inbox), Options(max_instructions=100_000))
