"""Times of sparse attention in prompts, whose neighbouring queries see mostly the same: one query a program, or more.

Lists are those that a pass plans: windows newest first, and every ratio-128 or ratio-4 entry of a request so far. Each
result is compared with that of one query a program before it is timed; times are those of CUDA graphs of several
launches (``benchmarks.kernels``) on unchanged inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.families import relative_error
from benchmarks.kernels import microseconds
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.triton_kernels.attention import tiling as tilings
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, new_semaphores, sparse_attention
from nvfp4_sgl.triton_kernels.attention.tiling import Tiling
from nvfp4_sgl.triton_kernels.entries.kv_entry import page_bytes, store_kv_entries

WINDOW, WINDOW_PAGE = 128, 256
ENTRY_PAGES = {4: 64, 128: 2}
"""Entries of a page, by ratio."""
TOPK = 512
"""Columns of ratio-4 entries: of more, each query would choose its own."""
PROMPTS = ((8, 1024, 0), (8, 1024, 128), (8, 1024, 4), (4, 2048, 4), (1, 8192, 128))
"""Requests, tokens of each, and the ratio of their entries; 0 for none."""
LIMIT = 0.01
"""Greatest norm of the difference from one query a program, over the result's."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of one pass: ``requests`` of ``tokens`` each, which see entries of ``ratio`` tokens, or none.

    ``cached``: tokens in front of each.
    """

    requests: int
    tokens: int
    ratio: int
    cached: int = 0

    @property
    def length(self) -> int:
        """Tokens of each request after the pass."""
        return self.cached + self.tokens

    def __str__(self) -> str:
        return f"{self.requests} x {self.tokens}, {f'ratio {self.ratio}' if self.ratio else 'windows alone'}"

    def windows(self, device: str) -> tuple[Tensor, Tensor]:
        """Slots, newest first, and their numbers; a request's positions lie one after the other."""
        position, request = self._queries(device)
        back = torch.arange(WINDOW, device=device)
        slots = request[:, None] * self.length + position[:, None] - back
        seen = position[:, None] >= back
        return torch.where(seen, slots, -1).int(), (position + 1).clamp(max=WINDOW).int()

    def entries(self, device: str, hca_columns: int | None = None) -> tuple[Tensor, Tensor]:
        """Slots of all entries that a query sees, and their numbers; by default columns for these sequences alone."""
        position, request = self._queries(device)
        count = self.length // self.ratio
        columns = TOPK if self.ratio == LayerKind.CSA.value else hca_columns or -(-count // 16) * 16
        column = torch.arange(columns, device=device).clamp(max=count - 1)
        return (request[:, None] * count + column).int(), ((position + 1) // self.ratio).clamp(max=columns).int()

    def owners(self, device: str) -> Tensor:
        return self._queries(device)[1].int()

    def _queries(self, device: str) -> tuple[Tensor, Tensor]:
        position = torch.arange(self.cached, self.length, device=device).repeat(self.requests)
        return position, torch.arange(self.requests, device=device).repeat_interleave(self.tokens)


def pool(count: int, page_size: int, device: str) -> Entries:
    """At least ``count`` random entries."""
    pages = -(-count // page_size)
    entries = Entries(torch.zeros(pages, page_bytes(page_size), dtype=torch.uint8, device=device), page_size)
    rows = torch.randn(pages * page_size, 512, device=device).bfloat16()
    store_kv_entries(rows, torch.arange(pages * page_size, device=device), entries.pages, page_size)
    return entries


def launches(
    prompts: Prompts, heads: int, device: str, hca_columns: int | None = None
) -> tuple[Callable[..., None], Tensor]:
    """A function that launches attention, with what else ``sparse_attention`` takes, and the tensor that it writes."""
    count = prompts.requests * prompts.tokens
    q = torch.randn(count, heads, 512, device=device).bfloat16()
    out = torch.empty_like(q)
    windows, window_lengths = prompts.windows(device)
    extra, slots, lengths = None, None, None
    if prompts.ratio:
        extra = pool(prompts.requests * (prompts.length // prompts.ratio), ENTRY_PAGES[prompts.ratio], device)
        slots, lengths = prompts.entries(device, hca_columns)
    angles = torch.rand(count, 32, device=device)
    run = partial(
        sparse_attention, q, pool(prompts.requests * prompts.length, WINDOW_PAGE, device), windows,
        torch.randn(heads, device=device), 512**-0.5, extra, slots, window_lengths=window_lengths,
        extra_lengths=lengths, cos_sin=torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1), query_eps=1e-6,
        semaphores=new_semaphores(count, heads, device), out=out,
    )  # fmt: skip
    return run, out


def candidates(heads: int) -> dict[str, Tiling]:
    """One query a program first, then as many as fill the tensor core's rows, in more and fewer stages."""
    several = tilings.FOUR_QUERIES if heads <= 16 else tilings.TWO_QUERIES
    return {
        "one query": tilings.default_tiling(heads, packed=True),
        f"{several.queries} queries": several,
        f"{several.queries} queries, 3 stages": replace(several, stages=3),
    }


def measured(
    prompts: Prompts, heads: int, device: str, timer: Callable[[Callable[[], None]], float]
) -> Iterator[tuple[str, float | str]]:
    """Microseconds of each candidate, or what is wrong with it."""
    torch.manual_seed(0)
    launch, out = launches(prompts, heads, device)
    given = {"owners": prompts.owners(device), "splits": 1}
    runs = {name: partial(launch, tiling=tiling, **given) for name, tiling in candidates(heads).items()}
    yield from compared(runs, out, timer)


def compared(
    runs: Mapping[str, Callable[[], None]], out: Tensor, timer: Callable[[Callable[[], None]], float]
) -> Iterator[tuple[str, float | str]]:
    """Microseconds of each launch, or what is wrong with what it writes to ``out``, by the first one's."""
    expected = None
    for name, run in runs.items():
        out.fill_(float("nan"))
        run()
        expected = out.clone() if expected is None else expected
        error = relative_error(out, expected)
        yield name, timer(run) if error <= LIMIT else f"wrong: {error:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_prompt_attention")
    parser.add_argument("--heads", type=int, nargs="+", default=[32, 16], help="heads of a query, up to 32")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_prompt_attention: no CUDA device; it measures, and measures nothing without one")
    failed = False
    for heads in arguments.heads:
        print(f"{torch.cuda.get_device_name()}, {heads} heads, us: {', '.join(candidates(heads))}")
        for sizes in PROMPTS:
            found = list(measured(Prompts(*sizes), heads, "cuda", microseconds))
            failed |= any(isinstance(us, str) for _, us in found)
            cells = (us if isinstance(us, str) else f"{us:.1f}" for _, us in found)
            print(f"| {Prompts(*sizes)} | {' | '.join(cells)} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
