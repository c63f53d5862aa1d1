"""Times sparse attention on a GPU in every tiling for a number of heads, beside the present one.

First, processes compile every kernel and report its registers, spills and shared memory. Then each case is launched in
the present tiling and in every candidate, each in several numbers of splits. A result far from the present tiling's is
reported and not timed. So is a candidate that does not compile, or of which a multiprocessor holds fewer programs than
it says: such programs would wait for one another forever. Times are those of CUDA graphs of several launches
(``benchmarks.kernels``) on unchanged inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from benchmarks.families import relative_error
from benchmarks.kernels import microseconds
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.triton_kernels.attention import tiling as tilings
from nvfp4_sgl.triton_kernels.attention.kernel import attend
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, new_partials, new_semaphores, sparse_attention
from nvfp4_sgl.triton_kernels.attention.tiling import Tiling, choose_splits, choose_tiling, most_splits
from nvfp4_sgl.triton_kernels.entries.kv_entry import page_bytes, store_kv_entries

CANDIDATES = {
    "default": tilings.HOPPER,
    "two tiles": tilings.HOPPER_TWO_TILES,
    "16": tilings.SIXTEEN_HEADS,
    "32": tilings.THIRTY_TWO_HEADS,
}
DECODE, PROMPTS = (1, 4, 16, 32, 64), (1024, 8192)
WINDOW, WINDOW_PAGE, EXTRA_PAGE = 128, 256, 64
EXTRA = (8, 256, 512)
SPLITS = (1, 2, 4, 8, 16)
GROUP_HEADS = 8
LIMIT = 0.01
"""Greatest norm of the difference from the present tiling's result, over the result's. Tilings round weights under
other maxima: about 0.003."""
SHARED, RESERVED, REGISTERS, WARPS = 228 * 1024, 1024, 65536, 64
"""What a multiprocessor of Hopper has: bytes of shared memory, those kept for each program, registers, warps."""

Launch = Callable[[], None]


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel: registers and spills of a thread, bytes of shared memory."""

    registers: int
    spills: int
    shared: int

    def resident(self, warps: int) -> int:
        """Programs of it that a multiprocessor holds at once."""
        registers = -(-self.registers // 8) * 8 * 32 * warps
        return min(REGISTERS // registers, SHARED // (self.shared + RESERVED), WARPS // warps)


@dataclass(frozen=True)
class Shape:
    """One case: so many queries of ``heads`` heads, each with a window and ``extra`` compressed entries."""

    queries: int
    heads: int
    extra: int
    quantized: bool

    @property
    def columns(self) -> tuple[int, int]:
        return WINDOW, self.extra

    def present(self, processors: int) -> tuple[Tiling, int]:
        """The tiling and the splits that serving has."""
        tiling = choose_tiling(self.queries, self.heads, self.columns, processors, packed=True)
        return tiling, choose_splits(self.queries, self.heads, self.columns, processors, tiling)

    def splits(self, processors: int, tiling: Tiling) -> list[int]:
        """Numbers of splits worth a measurement: the chosen one and powers of two, as far as there are places."""
        tiles = sum(-(-width // tiling.keys) for width in self.columns)
        most = min(most_splits(self.queries, self.heads, processors, tiling), tiles)
        chosen = choose_splits(self.queries, self.heads, self.columns, processors, tiling)
        return sorted({chosen, *(splits for splits in SPLITS if splits <= most)})


class Inputs:
    """Tensors of a case and what its launches write."""

    def __init__(self, shape: Shape, device: str):
        generator = torch.Generator(device).manual_seed(0)
        queries, heads = shape.queries, shape.heads
        self.shape = shape

        def pool(page_size: int) -> Entries:
            """As many entries as 64 queries have of their own; longer prompts share them."""
            pages = 64 * max(WINDOW, shape.extra) // page_size
            entries = torch.zeros(pages, page_bytes(page_size), device=device, dtype=torch.uint8)
            slots = torch.arange(pages * page_size, device=device)
            rows = torch.randn(slots.numel(), 512, device=device, generator=generator).bfloat16()
            store_kv_entries(rows, slots, entries, page_size)
            return Entries(entries, page_size)

        def slots(entries: Entries, width: int) -> Tensor:
            count = entries.pages.shape[0] * entries.page_size
            return torch.randint(count, (queries, width), device=device, dtype=torch.int32, generator=generator)

        window, extra = pool(WINDOW_PAGE), pool(EXTRA_PAGE)
        self.q = torch.randn(queries, heads, 512, device=device, generator=generator).bfloat16()
        self.out = torch.empty_like(self.q)
        self.rows = None
        if shape.quantized:
            self.rows = Rows.allocate(queries, GROUP_HEADS * 512, 128, device, groups=heads // GROUP_HEADS)
        self._semaphores = new_semaphores(queries, heads, device)
        lengths = [torch.full((queries,), width, device=device, dtype=torch.int32) for width in shape.columns]
        angles = torch.rand(queries, 32, device=device, generator=generator)
        self._run = partial(
            sparse_attention,
            self.q,
            window,
            slots(window, WINDOW),
            torch.randn(heads, device=device, generator=generator),
            512**-0.5,
            extra,
            slots(extra, shape.extra),
            window_lengths=lengths[0],
            extra_lengths=lengths[1],
            cos_sin=torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1),
            query_eps=1e-6,
            semaphores=self._semaphores,
        )

    def launch(self, tiling: Tiling, splits: int, *, quantized: bool) -> Launch:
        """One launch, which writes either ``out`` or ``rows``."""
        outputs: dict[str, Any] = {"out_rows": self.rows} if quantized else {"out": self.out}
        partials = new_partials(self.q, splits, quantized=quantized)
        return partial(self._run, tiling=tiling, splits=splits, partials=partials, **outputs)

    def result(self, tiling: Tiling, splits: int) -> Tensor:
        """The bf16 output of one launch, poisoned first."""
        self.out.fill_(float("nan"))
        self.launch(tiling, splits, quantized=False)()
        if self._semaphores.any():
            raise RuntimeError("semaphores are not zero after the launch")
        return self.out.clone()


def compiled(shape: Shape, tiling: Tiling, splits: int, device: str) -> Resources:
    """Compile the kernels of a launch into Triton's cache, without running them."""
    inputs, found = Inputs(shape, device), []
    run = attend.run

    def compile_only(*args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(run(*args, grid=grid, warmup=True, **options))

    attend.run = compile_only
    try:
        for quantized in {False, shape.quantized}:
            inputs.launch(tiling, splits, quantized=quantized)()
    finally:
        del attend.run
    for kernel in found:
        kernel._init_handles()
    return Resources(
        max(kernel.n_regs for kernel in found),
        max(kernel.n_spills for kernel in found),
        max(kernel.metadata.shared for kernel in found),
    )


def compile_all(shapes: Iterable[Shape], candidates: Mapping[str, Tiling], workers: int) -> dict[str, str]:
    """Compile all kernels of all candidates in processes; print their resources; return why candidates drop out."""
    one_query = {Shape(1, shape.heads, shape.extra, shape.quantized) for shape in shapes}
    refused: dict[str, str] = {}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        jobs = [
            (name, tiling, splits, pool.submit(compiled, shape, tiling, splits, "cuda"))
            for shape in sorted(one_query, key=str)
            for name, tiling in candidates.items()
            for splits in (1, 2)
        ]
        largest: dict[str, Resources] = {}
        for name, tiling, _, job in jobs:
            try:
                found = job.result()
            except Exception as error:
                refused[name] = f"does not compile: {type(error).__name__}: {str(error)[:200]}"
                continue
            held = found.resident(tiling.warps)
            if held < tiling.resident:
                refused[name] = f"a multiprocessor holds {held} programs, not {tiling.resident}: {found}"
            if name not in largest or found.registers + found.spills > largest[name].registers + largest[name].spills:
                largest[name] = found
    for name, tiling in candidates.items():
        taken = largest.get(name)
        what = refused.get(name) or f"{taken}, {taken.resident(tiling.warps) if taken else 0} programs"
        print(f"{name}: {tiling.heads} heads, {tiling.keys} keys, {tiling.warps} warps: {what}")
    return refused


def measured(
    inputs: Inputs, candidates: Mapping[str, Tiling], processors: int, timer: Callable[[Launch], float]
) -> Iterator[tuple[str, int, float | str]]:
    """Yield (name, splits, microseconds or error) of the present choice, named "present", and of all others."""
    shape = inputs.shape
    tiling, splits = shape.present(processors)
    expected = inputs.result(tiling, splits)
    if not expected.isfinite().all():
        raise RuntimeError(f"{shape}: the present tiling's result is not finite")
    yield "present", splits, timer(inputs.launch(tiling, splits, quantized=shape.quantized))
    for name, tiling in candidates.items():
        for splits in shape.splits(processors, tiling):
            try:
                error = relative_error(inputs.result(tiling, splits), expected)
                if not error <= LIMIT:
                    yield name, splits, f"wrong: {error:.3g}"
                    continue
                yield name, splits, timer(inputs.launch(tiling, splits, quantized=shape.quantized))
            except Exception as problem:
                yield name, splits, f"{type(problem).__name__}: {str(problem)[:120]}"


def line(shape: Shape, found: list[tuple[str, int, float | str]]) -> str:
    """One row: the present time, then each candidate's best, its splits and its other splits' times."""
    cells = [f"{shape.queries} x {shape.columns[0]}+{shape.columns[1]}"]
    for name in dict.fromkeys(name for name, _, _ in found):
        times = sorted((us, splits) for other, splits, us in found if other == name and not isinstance(us, str))
        problems = [f"/{splits} {us}" for other, splits, us in found if other == name and isinstance(us, str)]
        shown = [f"{us:.1f}/{splits}" for us, splits in times]
        best = f"{shown[0]} ({' '.join(shown[1:])})" if len(shown) > 1 else "".join(shown)
        cells.append(" ".join((best, *problems)).strip())
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_attention_tilings")
    parser.add_argument("--heads", type=int, default=32, help="heads of a query, a multiple of 8 (default: 32)")
    parser.add_argument("--quantized", action="store_true", help="outputs in NVFP4 rather than bf16")
    parser.add_argument("--jobs", type=int, default=16, metavar="N", help="processes that compile at once")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_attention_tilings: no CUDA device; it measures, and measures nothing without one")
    shapes = [
        Shape(queries, arguments.heads, extra, arguments.quantized)
        for queries in (*DECODE, *PROMPTS)
        for extra in EXTRA
    ]
    refused = compile_all(shapes, CANDIDATES, arguments.jobs)
    candidates = {name: tiling for name, tiling in CANDIDATES.items() if name not in refused}
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    print(f"{torch.cuda.get_device_name()}, {arguments.heads} heads: us/splits, the best first")
    print(f"| queries x columns | present | {' | '.join(candidates)} |\n|{' --- |' * (len(candidates) + 2)}")
    failed = bool(refused)
    for shape in shapes:
        found = list(measured(Inputs(shape, "cuda"), candidates, processors, microseconds))
        failed |= any(isinstance(us, str) for _, _, us in found)
        print(line(shape, found), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
