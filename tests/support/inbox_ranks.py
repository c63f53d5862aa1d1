"""Ranks that send parts to each other's inboxes and add them in mHC sites, each a process and, if there are, a GPU.

``python -m tests.support.inbox_ranks RANK RANKS ADDRESS [--time] [--cpu FOLDER]`` is one rank; :func:`run` starts all.
Every rank computes what all of them must find, with sums formed before the sites, and compares: the streams behind one
site bit for bit; the end of a pass of many sites, too, on a CPU, and on a GPU but for what the order of sums in a
site's GEMM makes, which the compiler chooses for each variant. Ranks must have the same bits as one another and in each
replay of a graph, while each is late by turns. Any difference ends a rank with an error.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4_sgl.triton_kernels.common.inbox import EMPTY, SLOTS, Inbox
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.hyper_connection.site import (
    Site,
    SiteState,
    hyper_connection_next,
    hyper_connection_pre,
    split_fn,
)
from tests.support import interpreter_speed

SCRATCH = SLOTS
"""A slot more, which nobody receives from."""
TOPK = 2
LIMIT = 2.0**-7
"""Relative error of a pass on a GPU: a sum that falls on the other side of a rounding moves all later sites."""
LATE_SECONDS = 0.002
LATE_CYCLES = 40_000
LATE_EVERY = 15
"""Sites of a pass from one at which a rank is late to the next: of either slot by turns."""
TIMED = 3
"""How often a time is taken, of which the least counts."""


@dataclass(frozen=True)
class Sizes:
    """What is run; ``timed`` replays follow each other where they are timed."""

    width: int
    capacity: int
    tokens: tuple[int, ...]
    sites: int
    replays: int
    timed: int


GPU = Sizes(width=4096, capacity=128, tokens=(1, 16, 17, 128), sites=80, replays=200, timed=20)
CPU = Sizes(width=40, capacity=8, tokens=(1, 3), sites=4, replays=4, timed=1)


class Replayed(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True)
class Eager:
    """What stands for a graph on a CPU."""

    replay: Callable[[], None]


@dataclass(frozen=True)
class Rank:
    """This rank, and all inboxes as it sees them: int16 [SLOTS + 1, ranks, capacity, width]."""

    number: int
    inboxes: list[Tensor]
    sizes: Sizes
    device: torch.device

    def places(self, slot: int, tokens: int) -> list[Tensor]:
        """This rank's part in every inbox, its own first, in bf16."""
        order = [self.number, *(other for other in range(len(self.inboxes)) if other != self.number)]
        return [self.inboxes[rank][slot, self.number, :tokens].view(torch.bfloat16) for rank in order]

    def inbox(self, slot: int) -> Inbox:
        return Inbox(self.inboxes[self.number][slot])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


Advance = Callable[[int], Tensor | Inbox]
"""From a site's number to the output to mix in there."""


class Pass:
    """A pass of many sites; what the experts give depends on the site before."""

    def __init__(self, rank: Rank, tokens: int, sites: int | None = None):
        self.rank, self.tokens, self.sites = rank, tokens, sites or rank.sizes.sites
        device, width = rank.device, rank.sizes.width
        generator = torch.Generator().manual_seed(tokens)
        values = torch.randn(24, 4 * width, generator=generator) * (4 * width) ** -0.5
        self.site = Site(
            fn=split_fn(values.to(device)),
            base=torch.randn(24, generator=generator).to(device),
            scale=torch.ones(3, device=device),
            hc_eps=1e-6,
            norm_eps=1e-6,
            norm=torch.ones(width, dtype=torch.bfloat16, device=device),
            iterations=20,
        )
        self.start = torch.randn(tokens, 4, width, generator=generator).bfloat16().to(device)
        self.weights = torch.rand(tokens, TOPK, generator=generator).to(device)
        self.destination = torch.randperm(tokens * TOPK, generator=generator).view(tokens, TOPK).int().to(device)
        self.rows = torch.empty(tokens * TOPK, width, dtype=torch.bfloat16, device=device)
        self.out = torch.empty(tokens, width, dtype=torch.bfloat16, device=device)
        self.streams = torch.empty_like(self.start)
        self.state = SiteState.allocate(tokens, width, device)

    def run(self, advance: Advance) -> None:
        self.streams.copy_(self.start)
        hyper_connection_pre(self.site, self.streams, self.state)
        for number in range(self.sites):
            hyper_connection_next(self.site, advance(number), self.streams, self.state)

    def experts(self, rank: int) -> None:
        """Fill the rows of a rank's experts."""
        torch.mul(self.state.x, rank + 1, out=self.rows[: self.tokens])
        torch.neg(self.state.x.roll(rank + 1, 1), out=self.rows[self.tokens :])

    def summed(self, ranks: int, number: int) -> Tensor:
        """What all ranks give, added in fp32."""
        total = torch.zeros(self.out.shape, device=self.out.device)
        for rank in range(ranks):
            self.experts(rank)
            part = finalize(self.rows, self.destination, self.weights, self.out).float()
            total = part if rank == 0 else total + part
        return total.bfloat16()

    def sent(self, late: bool, number: int) -> Inbox:
        """This rank's part, on its way to all ranks; if ``late``, each rank is so by turns."""
        slot, ranks = number % SLOTS, len(self.rank.inboxes)
        if late and self.rank.device.type == "cuda" and number % LATE_EVERY == LATE_EVERY // ranks * self.rank.number:
            torch.cuda._sleep(LATE_CYCLES)
        self.experts(self.rank.number)
        own, *copies = self.rank.places(slot, self.tokens)
        finalize(self.rows, self.destination, self.weights, own, copies=copies)
        return self.rank.inbox(slot)

    def digest(self) -> str:
        """What the pass has found, in short."""
        self.rank.synchronize()
        found = hashlib.sha256()
        for tensor in (self.streams, self.state.x, self.state.post, self.state.comb):
            found.update(tensor.view(torch.uint8).cpu().numpy().tobytes())
        assert not self.state.semaphores.any()
        return found.hexdigest()


def captured(rank: Rank, work: Callable[[], None]) -> Replayed:
    """A graph of ``work``, which all ranks capture together: it runs once before."""
    if rank.device.type != "cuda":
        return Eager(work)
    work()
    rank.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def check(rank: Rank, tokens: int) -> None:
    ranks, name = len(rank.inboxes), f"rank {rank.number}, {tokens} tokens"
    one, wanted = Pass(rank, tokens, sites=1), Pass(rank, tokens, sites=1)
    wanted.run(partial(wanted.summed, ranks))
    one.run(partial(one.sent, False))
    different = int((one.streams != wanted.streams).sum())
    assert not different, f"{name}: {different} values of the streams behind one site differ"
    rank.synchronize()
    dist.barrier()  # the same slot comes again

    work, wanted = Pass(rank, tokens), Pass(rank, tokens)
    wanted.run(partial(wanted.summed, ranks))
    work.run(partial(work.sent, False))
    first = work.digest()
    for what, found, exact in (("streams", work.streams, wanted.streams), ("x", work.state.x, wanted.state.x)):
        different, error = int((found != exact).sum()), float((found - exact).float().norm() / exact.float().norm())
        print(f"{name}: {different} of {found.numel()} values of {what} differ, relative error {error:.3g}", flush=True)
        assert error < LIMIT and (not different or rank.device.type == "cuda"), name
    graph = captured(rank, partial(work.run, partial(work.sent, True)))
    for replay in range(rank.sizes.replays):
        if replay % 4 == 0 and replay // 4 % ranks == rank.number:
            time.sleep(LATE_SECONDS)
        work.streams.zero_()
        graph.replay()
        if replay % 4 == 3:
            assert work.digest() == first, f"{name}: replay {replay} gives other bits"
    found_by_all: list[Any] = [None] * ranks
    dist.all_gather_object(found_by_all, work.digest())
    assert set(found_by_all) == {first}, f"{name}: the ranks' bits differ"
    assert bool((rank.inboxes[rank.number][:SLOTS] == EMPTY.value).all()), f"{name}: an inbox is not empty in the end"
    dist.barrier()


def microseconds(rank: Rank, work: Callable[[], None]) -> float:
    """The time of a site, in graphs that follow each other at once; the least of several."""
    graph, times = captured(rank, work), []
    for _ in range(TIMED):
        rank.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(rank.sizes.timed):
            graph.replay()
        rank.synchronize()
        times.append((time.perf_counter() - begin) * 1e6 / rank.sizes.timed / rank.sizes.sites)
    return min(times)


def report(rank: Rank, tokens: int) -> None:
    """Print µs a site: alone, behind a sum of experts, with parts that nobody waits for, and with the exchange."""
    work = Pass(rank, tokens)
    work.state.x.copy_(work.start[:, 0])
    work.experts(rank.number)

    def send(number: int, slot: int, copies: bool) -> Tensor:
        own, *others = rank.places(slot, tokens)
        return finalize(work.rows, work.destination, work.weights, own, copies=others if copies else ())

    def exchange(number: int) -> Inbox:
        send(number, number % SLOTS, True)
        return rank.inbox(number % SLOTS)

    ways: dict[str, Advance] = {
        "site": lambda number: work.out,
        "finalize + site": lambda number: send(number, SCRATCH, False),
        "finalize with copies + site": lambda number: send(number, SCRATCH, True),
        "finalize with copies + site with inbox": exchange,
    }
    work.out.zero_()
    found = [f"{name} {microseconds(rank, partial(work.run, way)):.2f}" for name, way in ways.items()]
    print(f"us a site, rank {rank.number}, {tokens} tokens: {'; '.join(found)}", flush=True)


def mapped_inboxes(sizes: Sizes, device: torch.device) -> list[Tensor]:
    """All ranks' inboxes in the memory of their GPUs, empty, as this rank sees them; all ranks call this."""
    from torch.distributed import _symmetric_memory as symmetric

    here, ranks = dist.get_rank(), dist.get_world_size()
    shape = (SLOTS + 1, ranks, sizes.capacity, sizes.width)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    own = symmetric.empty(*shape, dtype=torch.int16, device=device)
    world = dist.group.WORLD
    assert world is not None
    shared = symmetric.rendezvous(own, world)
    own.fill_(EMPTY.value)
    torch.cuda.synchronize(device)
    return [own if rank == here else shared.get_buffer(rank, shape, torch.int16) for rank in range(ranks)]


def filed_inboxes(sizes: Sizes, folder: Path) -> list[Tensor]:
    """The same in files that processes map."""
    here, ranks = dist.get_rank(), dist.get_world_size()
    shape = (SLOTS + 1, ranks, sizes.capacity, sizes.width)
    count = torch.Size(shape).numel()
    found = [
        torch.from_file(str(folder / f"inbox {rank}"), shared=True, size=count, dtype=torch.int16).view(shape)
        for rank in range(ranks)
    ]
    found[here].fill_(EMPTY.value)
    return found


def run(ranks: int, logs: Path, seconds: float, *options: str, **environment: str) -> str:
    """Run all ranks on this machine; what they print.

    Raises:
        AssertionError: with that, if a rank fails.
        subprocess.TimeoutExpired: a rank takes longer than ``seconds``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    files = [logs / f"{rank}.log" for rank in range(ranks)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(rank), str(ranks), address, *options],
            cwd=root, env={**os.environ, "PYTHONPATH": paths, **environment}, stdout=file.open("wb"),
            stderr=subprocess.STDOUT,
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    until = time.monotonic() + seconds
    try:
        codes = [process.wait(max(until - time.monotonic(), 0)) for process in started]
    finally:
        for process in started:
            process.kill()
        print(said := "\n".join(file.read_text() for file in files))
    assert codes == [0] * ranks, said
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("address", help="of the ranks' store, e.g. tcp://127.0.0.1:29500")
    parser.add_argument("--time", action="store_true", help="time sites, too")
    parser.add_argument("--cpu", type=Path, metavar="FOLDER", help="without GPUs, in Triton's interpreter")
    given = parser.parse_args()
    device = torch.device("cpu") if given.cpu else torch.device("cuda", given.rank)
    sizes = CPU if given.cpu else GPU
    if given.cpu:
        interpreter_speed.install()
    else:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=given.address, rank=given.rank, world_size=given.ranks)
    inboxes = filed_inboxes(sizes, given.cpu) if given.cpu else mapped_inboxes(sizes, device)
    dist.barrier()  # nobody sends before every inbox is empty
    rank = Rank(given.rank, inboxes, sizes, device)
    for tokens in sizes.tokens:
        check(rank, tokens)
    for tokens in sizes.tokens if given.time else ():
        report(rank, tokens)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
