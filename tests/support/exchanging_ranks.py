"""Ranks on GPUs that sum inside mHC sites (``triton_kernels.hyper_connection.exchange``): each a process of its own.

``python -m tests.support.exchanging_ranks RANK RANKS ADDRESS [--time]`` is one rank. Every rank computes what all of
them must find, with the sums formed before the sites, and compares bit for bit; any difference ends it with an error.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from nvfp4_sgl.targets.fused.peer_sums import shared_inboxes
from nvfp4_sgl.triton_kernels.hyper_connection.exchange import EMPTY, SLOTS, Slot, slots
from nvfp4_sgl.triton_kernels.hyper_connection.site import (
    Site,
    SiteState,
    hyper_connection_next,
    hyper_connection_pre,
    split_fn,
)

WIDTH, CAPACITY = 4096, 128
TOKENS = (1, 2, 16, 17, 64, 128)
SITES = 6
"""Of a pass."""
REPLAYS = 200
TIMED_TOKENS, TIMED_SITES, TIMED_REPLAYS = (1, 16, 64), 80, 30


class Pass:
    """A pass of several sites, each of whose outputs depends on its input; ``sums`` forms the ranks' sum, or leaves it
    to the site."""

    def __init__(self, tokens: int, device: torch.device, sites: int = SITES):
        generator = torch.Generator().manual_seed(tokens)
        values = torch.randn(24, 4 * WIDTH, generator=generator) * (4 * WIDTH) ** -0.5
        self.site = Site(
            split_fn(values.to(device)),
            torch.randn(24, generator=generator).to(device),
            torch.ones(3, device=device),
            1e-6,
            1e-6,
            torch.ones(WIDTH, dtype=torch.bfloat16, device=device),
            20,
        )
        self.start = torch.randn(tokens, 4, WIDTH, generator=generator).bfloat16().to(device)
        self.streams, self.sites = torch.empty_like(self.start), sites
        self.state = SiteState.allocate(tokens, WIDTH, device)

    def part(self, number: int, rank: int) -> Tensor:
        """What a rank's sublayer gives."""
        return self.state.x.roll(rank + number, 1) * (rank + 1)

    def run(self, advance: Callable[[int], tuple[Tensor, Slot | None]]) -> None:
        """All sites; ``advance(number)`` gives the output to mix in, and where it is summed."""
        self.streams.copy_(self.start)
        hyper_connection_pre(self.site, self.streams, self.state)
        for number in range(self.sites):
            output, slot = advance(number)
            hyper_connection_next(self.site, output, self.streams, self.state, slot=slot)

    def whole(self, ranks: int) -> tuple[Tensor, Tensor]:
        """What all ranks must find."""

        def advance(number: int) -> tuple[Tensor, None]:
            parts = [self.part(number, rank).float() for rank in range(ranks)]
            return torch.stack(parts).sum(0).bfloat16(), None

        self.run(advance)
        return self.streams.clone(), self.state.x.clone()

    def exchanged(self, rank: int, mine: list[Slot]) -> None:
        self.run(lambda number: (self.part(number, rank), mine[number % SLOTS]))


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def check(rank: int, ranks: int, device: torch.device, mine: list[Slot]) -> None:
    for tokens in TOKENS:
        work = Pass(tokens, device)
        expected = work.whole(ranks)

        def require_equal(when: str, work: Pass = work, expected: tuple[Tensor, Tensor] = expected) -> None:
            torch.cuda.synchronize()
            for name, found, wanted in zip(("streams", "x"), (work.streams, work.state.x), expected, strict=True):
                different = int((found != wanted).sum())
                assert not different, f"rank {rank}, {len(found)} tokens, {when}: {different} of {name} differ"
            assert not work.state.semaphores.any()

        work.exchanged(rank, mine)
        require_equal("eager")
        graph = captured(lambda work=work: work.exchanged(rank, mine))  # type: ignore[misc]
        late = random.Random(rank)
        for replay in range(REPLAYS):
            if late.random() < 0.1:
                time.sleep(late.random() * 0.003)
            graph.replay()
            if replay % 40 == 0:
                require_equal(f"replay {replay}")
        require_equal("last replay")
        dist.barrier()
    assert all(bool((slot.inbox == EMPTY.value).all()) for slot in mine), "inboxes are not empty in the end"


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """A replay's time; ranks begin together."""
    times = []
    for _ in range(TIMED_REPLAYS):
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times)[TIMED_REPLAYS // 2]


def report(rank: int, tokens: int, device: torch.device, mine: list[Slot]) -> None:
    """Print µs a site, alone and with the sum."""
    work = Pass(tokens, device, TIMED_SITES)
    outputs = [torch.randn(tokens, WIDTH, device=device).bfloat16() for _ in range(TIMED_SITES)]
    alone = captured(lambda: work.run(lambda number: (outputs[number], None)))
    summed = captured(lambda: work.run(lambda number: (outputs[number], mine[number % SLOTS])))
    before, after = (microseconds(graph) / TIMED_SITES for graph in (alone, summed))
    print(f"rank {rank}, {tokens} tokens: {before:.2f} us a site, {after:.2f} us with the sum over ranks", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("address", help="of the ranks' store, e.g. tcp://127.0.0.1:29500")
    parser.add_argument("--time", action="store_true", help="time sites, too")
    given = parser.parse_args()
    device = torch.device("cuda", given.rank)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", init_method=given.address, rank=given.rank, world_size=given.ranks)
    world = dist.group.WORLD
    assert world is not None
    mine = slots(given.rank, shared_inboxes(world, CAPACITY, WIDTH, device))
    check(given.rank, given.ranks, device, mine)
    for tokens in TIMED_TOKENS if given.time else ():
        report(given.rank, tokens, device, mine)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
