"""mHC sites that add the parts of ranks from an inbox, against the same sites behind a plain sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.limits import PUSHING_RANKS
from nvfp4_sgl.pushed_sums import capacity
from nvfp4_sgl.triton_kernels.common.inbox import EMPTY, SLOTS, Inbox, empty_inbox
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.hyper_connection import tiling
from nvfp4_sgl.triton_kernels.hyper_connection.site import (
    Site,
    SiteState,
    hyper_connection_next,
    hyper_connection_pre,
)
from tests.support import inbox_ranks
from tests.triton.support.interpreter import mapped
from tests.triton.support.resources import resources
from tests.triton.support.rows import poisoned_rows
from tests.triton.test_hyper_connection import MANY, make_site, make_streams, poisoned_state

FLASH, PRO = 4096, 7168
"""Widths of the models."""
CAPACITY = 40
"""Tokens that inboxes hold, more than any pass has."""
BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.int32: torch.int32}


def make_parts(ranks: int, tokens: int, d: int, device: str) -> list[Tensor]:
    """A part a rank: outliers, zeros of both signs, and values that cancel."""
    parts = torch.randn(ranks, tokens, d)
    parts[:, :, :: max(d // 7, 1)] *= 100
    parts[:, :, 1::5] = -0.0
    parts[0, :, 2::9] = -parts[1, :, 2::9]
    return list(parts.bfloat16().to(device))


def total(parts: Sequence[Tensor]) -> Tensor:
    """Their sum in fp32, rank after rank, rounded once."""
    sum_ = parts[0].float()
    for part in parts[1:]:
        sum_ = sum_ + part.float()
    return sum_.bfloat16()


def arrive(inbox: Inbox, parts: Sequence[Tensor]) -> None:
    for rank, part in enumerate(parts):
        inbox.parts[rank, : len(part)] = part.view(torch.int16)


def run(site: Site, output: Tensor | Inbox, streams: Tensor, quantized: bool) -> dict[str, Tensor]:
    """What a site leaves behind another one, as bits."""
    device, (tokens, _, d) = str(streams.device), streams.shape
    state = poisoned_state(tokens, d, device)
    if quantized:
        state = replace(state, quantized=poisoned_rows(tokens, d, device, 8))
    torch.manual_seed(5)
    hyper_connection_pre(make_site(d, device), streams, state)
    found = {"streams": hyper_connection_next(site, output, streams.clone(), state)}
    found |= {name: getattr(state, name) for name in ("x", "post", "comb")}
    found = {name: tensor.view(BITS[tensor.dtype]) for name, tensor in found.items()}
    if state.quantized is not None:
        found |= {name: getattr(state.quantized, name).view(torch.uint8) for name in ("codes", "block_scales")}
    return {**found, "semaphores": state.semaphores}


def check(site: Site, parts: Sequence[Tensor], streams: Tensor, quantized: bool = False) -> None:
    d = parts[0].shape[1]
    expected = run(site, total(parts), streams, quantized)
    assert not expected["semaphores"].any()
    for slot in range(SLOTS):
        inboxes = empty_inbox(len(parts), CAPACITY, d, streams.device)
        inbox = Inbox(inboxes[slot])
        arrive(inbox, parts)
        # What is not to be read or written: the other slot.
        inboxes[1 - slot].fill_(77)
        found = run(site, inbox, streams, quantized)
        for name, bits in expected.items():
            assert torch.equal(found[name], bits), name
        assert bool((inbox.parts == EMPTY.value).all())
        assert bool((inboxes[1 - slot] == 77).all())


@pytest.fixture(params=[False, True], ids=["", "many"])
def tiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As planned, or in mixers of several steps and several blocks, with tickets."""
    if request.param:
        monkeypatch.setattr(tiling, "TILINGS", ((None, replace(MANY, warps=4)),))
        monkeypatch.setattr(tiling, "MAX_WAITING_WITHOUT_TICKETS", 3)


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize(("tokens", "d", "ranks"), [(1, 72, 4), (18, 40, 2), (3, 200, 8)])
@pytest.mark.usefixtures("tiled")
def test_a_site_adds_the_parts(tokens: int, d: int, ranks: int, head: bool, device: str) -> None:
    torch.manual_seed(tokens)
    site, streams = make_site(d, device, head=head), make_streams(tokens, d, device)
    check(site, make_parts(ranks, tokens, d, device), streams)


@pytest.mark.usefixtures("tiled")
def test_a_site_that_quantizes_adds_the_parts(device: str) -> None:
    torch.manual_seed(3)
    check(make_site(64, device), make_parts(2, 17, 64, device), make_streams(17, 64, device), quantized=True)


def test_a_site_of_larger_blocks_adds_the_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in several steps."""
    monkeypatch.setattr(tiling, "TILINGS", ((None, replace(tiling.choose_tiling(64), programs=2, span=64)),))
    torch.manual_seed(4)
    check(make_site(136, device), make_parts(2, 5, 136, device), make_streams(5, 136, device))


def test_no_part_is_taken_for_one_that_is_to_come(device: str) -> None:
    """Zeros of both signs, infinities, and NaNs of all bits but those of EMPTY."""
    d = 64
    special = torch.tensor(
        [0, -0x8000, 0x7F80, -0x80, 0x7FFF, 0x7FC0, -2, 0x7F81, -0x7F, 1, -0x7FFF], dtype=torch.int16
    )
    torch.manual_seed(0)
    parts = [special[torch.randint(len(special), (3, d))].view(torch.bfloat16).to(device) for _ in range(2)]
    zeros = [torch.full((3, d), -0.0, dtype=torch.bfloat16, device=device) for _ in range(2)]
    site, streams = make_site(d, device), make_streams(3, d, device)
    check(site, zeros, streams)
    # Bits of NaNs count, too: both ways round the same sum.
    check(site, parts, streams)


def send(values: Tensor, out: Tensor, copies: Sequence[Tensor]) -> None:
    """Send :func:`part_of` of ``values`` to inboxes, int16 [T, d], as the sum of two experts' rows."""
    tokens = len(values)
    destination = torch.arange(2 * tokens, dtype=torch.int32, device=values.device).view(2, tokens).T.contiguous()
    rows = torch.cat([values, values.roll(1, 1)])
    mapped(copies)
    finalize(rows, destination, None, out.view(torch.bfloat16), copies=[copy.view(torch.bfloat16) for copy in copies])


def part_of(values: Tensor) -> Tensor:
    return (values.float() + values.roll(1, 1).float()).bfloat16()


def test_nans_of_a_sender_arrive(device: str) -> None:
    """Whatever the bits of what it adds."""
    d, tokens = 64, 3
    values = torch.randn(tokens, d)
    values.view(torch.int32)[:, ::3] = torch.tensor([-1, 0x7FFFFFFF, -0x400000], dtype=torch.int32)[:, None]
    values = values.to(device)
    inboxes = [empty_inbox(2, CAPACITY, d, device)[0] for _ in range(2)]
    send(values, inboxes[0][0, :tokens], [inboxes[1][0, :tokens]])
    for inbox in inboxes:
        assert bool((inbox[0, :tokens] != EMPTY.value).all())
        assert bool((inbox[0, tokens:] == EMPTY.value).all()) and bool((inbox[1] == EMPTY.value).all())
        assert torch.equal(inbox[0, :tokens].view(torch.bfloat16).isnan(), part_of(values).isnan())
    inboxes[0][1, :tokens] = 0
    state, site, streams = poisoned_state(tokens, d, device), make_site(d, device), make_streams(tokens, d, device)
    hyper_connection_pre(site, streams, state)
    hyper_connection_next(site, Inbox(inboxes[0]), streams, state)
    assert torch.equal(streams.isnan().any(1), part_of(values).isnan())


def test_ranks_send_and_receive(device: str, tmp_path: Path) -> None:
    """Two processes, each waiting for the other, over memory that they share; each is late by turns."""
    if device == "cuda":
        pytest.skip("two GPUs do so in tests/gpu/test_inbox.py")
    said = inbox_ranks.run(2, tmp_path, 200, "--time", "--cpu", str(tmp_path), TRITON_INTERPRET="1")
    assert said.count("us a site") == 2 * len(inbox_ranks.CPU.tokens)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (torch.zeros(2, 8, 64, dtype=torch.bfloat16), "expected dtype torch.int16"),
        (torch.zeros(2, 64, dtype=torch.int16), r"expected shape \[ranks, capacity, d\]"),
        (torch.zeros(3, 8, 64, dtype=torch.int16), "ranks: expected one of"),
        (torch.zeros(1, 8, 64, dtype=torch.int16), "ranks: expected one of"),
        (torch.zeros(2, 4, 64, dtype=torch.int16), "expected a capacity of at least 5 tokens, found 4"),
        (torch.zeros(2, 8, 32, dtype=torch.int16), r"expected shape \(2, 8, 64\)"),
        (torch.zeros(2, 64, 8, dtype=torch.int16).mT, "expected a contiguous tensor"),
        (torch.zeros(2, 8, 64, dtype=torch.int16, device="meta"), "expected device cpu"),
    ],
)
def test_no_other_inbox_is_taken(parts: Tensor, words: str) -> None:
    state: Any = SiteState.allocate(5, 64, "cpu")
    with pytest.raises(OperandError, match="hyper_connection_next: output.*" + words):
        hyper_connection_next(make_site(64, "cpu"), Inbox(parts), make_streams(5, 64, "cpu"), state)


def launches() -> None:
    pro = [(1, 2, 24), (1, 8, 24), (1, 4, 4), (64, 2, 24), (64, 4, 24), (64, 8, 4)]
    flash = [(capacity(ranks), ranks, 24) for ranks in PUSHING_RANKS]
    for tokens, ranks, rows, d in [(*case, PRO) for case in pro] + [(*case, FLASH) for case in flash]:
        head = rows == 4
        fn, norm = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((3, rows, 4 * d), (d,)))
        base, scale = (torch.empty(count, device="meta") for count in (rows, 1 if head else 3))
        site = Site(fn, base, scale, 1e-6, 1e-6, norm, 0 if head else 20)
        state = SiteState.allocate(tokens, d, "meta")
        inbox = Inbox(empty_inbox(ranks, 512, d, "meta")[0])
        hyper_connection_next(site, inbox, torch.empty(tokens, 4, d, dtype=torch.bfloat16, device="meta"), state)
    outputs = torch.empty(64, FLASH, dtype=torch.bfloat16, device="meta")
    for others in (1, 3, 7):
        destination = torch.empty(8, 7, dtype=torch.int32, device="meta")
        weights, out, copies = torch.empty(8, 7, device="meta"), outputs[:8], [outputs[8:16]] * others
        finalize(outputs, destination, weights, out, copies=copies)


def test_nothing_spills() -> None:
    for usage in resources(__name__):
        usage.require_no_spills()


def test_a_site_waits_once() -> None:
    """In one go, or in as few as a thread's registers allow; the site's own loads are on their way meanwhile.

    The compiler would let a thread wait twice for the same, in two layouts, if it thought that waiting had effects.
    """
    sites = [usage for usage in resources(__name__) if usage.kernel == "site_kernel"]
    assert {usage.architecture for usage in sites} == {90, 100}
    for usage in sites:
        waits, loads = usage.count("vote.sync.any"), usage.count("setp.eq.s16")
        assert waits == 1 or loads == 32 * waits, usage
        assert usage.count("cp.async.cg") > 0, usage


def test_senders_convert_with_the_instruction_that_never_gives_empty() -> None:
    for usage in resources(__name__):
        if usage.kernel == "_finalize":
            assert usage.count("cvt.rn.bf16x2.f32") == usage.count("cvt.rn.bf16") == 4, usage
