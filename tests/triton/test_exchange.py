"""Sums over ranks inside an mHC site, against the same site behind a sum of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.triton_kernels.hyper_connection import exchange, tiling
from nvfp4_sgl.triton_kernels.hyper_connection.exchange import EMPTY, SLOTS, Slot, empty_inbox, slots
from nvfp4_sgl.triton_kernels.hyper_connection.site import SiteState, hyper_connection_next, hyper_connection_pre
from tests.triton.test_hyper_connection import MANY, make_site, make_streams, poisoned_state

CAPACITY = 40
"""Tokens that inboxes hold, more than any pass has."""


def make_parts(ranks: int, tokens: int, d: int, device: str) -> list[Tensor]:
    """A part a rank: outliers, zeros of both signs, and values that cancel."""
    parts = torch.randn(ranks, tokens, d)
    parts[:, :, :: max(d // 7, 1)] *= 100
    parts[:, :, 1::5] = -0.0
    parts[0, :, 2::9] = -parts[1, :, 2::9]
    return [part.to(device) for part in parts.bfloat16()]


def total(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.float() for part in parts]).sum(0).bfloat16()


def arrived(slot: Slot, parts: Sequence[Tensor], but: int) -> None:
    """What the other ranks would have sent."""
    for rank, part in enumerate(parts):
        if rank != but:
            bits = part.view(torch.int16)
            slot.inbox[rank, : len(part)] = torch.where(bits == EMPTY.value, 0, bits)


def run(site: Any, output: Tensor, streams: Tensor, slot: Slot | None) -> tuple[Tensor, SiteState]:
    device = str(streams.device)
    state = poisoned_state(len(streams), streams.shape[2], device)
    hyper_connection_pre(make_site(streams.shape[2], device), streams, state)
    return hyper_connection_next(site, output, streams.clone(), state, slot=slot), state


@pytest.fixture(params=[False, True], ids=["", "many"])
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As planned, or in mixers of several steps and several blocks."""
    if request.param:
        monkeypatch.setattr(tiling, "TILINGS", ((None, MANY),))


@pytest.mark.parametrize(("tokens", "d", "ranks"), [(1, 72, 4), (18, 40, 2)])
@pytest.mark.usefixtures("tiled")
def test_a_site_sums_the_parts(tokens: int, d: int, ranks: int, device: str) -> None:
    torch.manual_seed(tokens)
    site, streams, parts = make_site(d, device), make_streams(tokens, d, device), make_parts(ranks, tokens, d, device)
    own = ranks - 1
    inboxes = [empty_inbox(ranks, CAPACITY, d, device) for _ in range(ranks)]
    for index, slot in enumerate(slots(own, inboxes)):
        torch.manual_seed(5)
        expected, before = run(site, total(parts), streams, None)
        torch.manual_seed(5)
        arrived(slot, parts, own)
        found, after = run(site, parts[own], streams, slot)
        assert torch.equal(found, expected)
        for name in ("x", "post", "comb"):
            assert torch.equal(getattr(after, name), getattr(before, name)), name
        assert not after.semaphores.any()
        sent = torch.where(parts[own].view(torch.int16) == EMPTY.value, 0, parts[own].view(torch.int16))
        for rank, inbox in enumerate(inboxes):
            if rank != own:
                assert torch.equal(inbox[index, own, :tokens], sent)
                inbox[index, own, :tokens] = EMPTY.value
        # The inbox is as it was, and nothing else was written.
        assert all(bool((inbox == EMPTY.value).all()) for inbox in inboxes)


def test_no_ranks_sums_are_empty(device: str) -> None:
    """Zeros of either sign arrive: none is taken for a value that is still to come."""
    d, parts = 64, [torch.full((2, 64), -0.0, dtype=torch.bfloat16, device=device) for _ in range(2)]
    torch.manual_seed(0)
    site, streams = make_site(d, device), make_streams(2, d, device)
    slot = slots(0, [empty_inbox(2, CAPACITY, d, device) for _ in range(2)])[0]
    arrived(slot, parts, 0)
    torch.manual_seed(5)
    found, _ = run(site, parts[0], streams, slot)
    torch.manual_seed(5)
    expected, _ = run(site, torch.zeros_like(parts[0]), streams, None)
    assert torch.equal(found, expected)


STEPS, WORK_TOKENS, WIDTH = 4, (1, 2), 40


def _work(rank: int, inboxes: Sequence[Tensor], delays: Sequence[float], results: Path) -> None:
    """One rank of two: a few passes of four sites each; every site's output depends on its input."""
    mine = slots(rank, inboxes)
    found = []
    for step, delay in enumerate(delays):
        time.sleep(delay)
        torch.manual_seed(step)
        tokens = WORK_TOKENS[step % 2]
        streams, site = make_streams(tokens, WIDTH, "cpu"), make_site(WIDTH, "cpu")
        state = SiteState.allocate(tokens, WIDTH, "cpu")
        hyper_connection_pre(site, streams, state)
        for number in range(4):
            part = (state.x.float() * (rank + 1 + number)).bfloat16()
            streams = hyper_connection_next(site, part, streams, state, slot=mine[number % SLOTS])
        found.append((streams, state.x))
    torch.save(found, results)


def test_ranks_exchange(device: str, tmp_path: Path) -> None:
    """Two processes, each waiting for the other, over memory that they share; each is late by turns."""
    if device == "cuda":
        pytest.skip("two GPUs exchange in tests/gpu/test_pair.py")
    context = processes.get_context("fork")
    inboxes = [empty_inbox(2, CAPACITY, WIDTH, "cpu").share_memory_() for _ in range(2)]
    results = [tmp_path / f"{rank}.pt" for rank in range(2)]
    delays = [[0.3 * (step % 3 == rank) for step in range(STEPS)] for rank in range(2)]
    workers = [context.Process(target=_work, args=(rank, inboxes, delays[rank], results[rank])) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
        assert worker.exitcode == 0
    found = [torch.load(result) for result in results]
    for step, ((streams, x), (others, other_x)) in enumerate(zip(found[0], found[1], strict=True)):
        torch.manual_seed(step)
        tokens = WORK_TOKENS[step % 2]
        expected, site = make_streams(tokens, WIDTH, "cpu"), make_site(WIDTH, "cpu")
        state = SiteState.allocate(tokens, WIDTH, "cpu")
        hyper_connection_pre(site, expected, state)
        for number in range(4):
            parts = [(state.x.float() * (rank + 1 + number)).bfloat16() for rank in range(2)]
            expected = hyper_connection_next(site, total(parts), expected, state)
        for mine in (streams, others):
            assert torch.equal(mine, expected), step
        assert torch.equal(x, other_x) and torch.equal(x, state.x), step
    assert all(bool((inbox == EMPTY.value).all()) for inbox in inboxes)


def _slot(**changed: Tensor | list[Tensor]) -> Slot:
    inboxes = [empty_inbox(2, 4, 64, "cpu") for _ in range(2)]
    given = slots(0, inboxes)[0]
    return Slot(**{"inbox": given.inbox, "outboxes": given.outboxes} | changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "tokens", "dtype", "words"),
    [
        ({}, 5, torch.bfloat16, r"inbox: expected \[ranks, at least 5 tokens, 64\]"),
        ({}, 4, torch.float32, "output: expected dtype torch.bfloat16"),
        ({"inbox": torch.zeros(2, 4, 32, dtype=torch.int16)}, 4, torch.bfloat16, "inbox"),
        ({"outboxes": [torch.zeros(4, 64, dtype=torch.int16)] * 3}, 4, torch.bfloat16, "of which there may be"),
        ({"outboxes": [torch.zeros(4, 32, dtype=torch.int16)] * 2}, 4, torch.bfloat16, "outbox of rank 0"),
    ],
)
def test_bad_input(changed: Any, tokens: int, dtype: torch.dtype, words: str) -> None:
    with pytest.raises(OperandError, match=words):
        _slot(**changed).check("op", torch.zeros(tokens, 64, dtype=dtype))


def test_no_thread_shares_a_value() -> None:
    """What ``receive`` asks of tiles."""
    for _, each in tiling.TILINGS:
        assert min(exchange.RANK_COUNTS) * each.tokens * each.columns >= each.warps * 32
