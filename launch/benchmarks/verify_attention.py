"""Times of sparse attention in passes that verify drafts, whose requests have a few queries each.

Three launches on the same inputs: one query a program, as serving plans it where nothing is shared; blocks of queries
cut inside requests; and, for comparison, blocks cut over the whole pass, of which some have queries of two requests.
Layers are those of a request of some 1.5 thousand tokens in a graph for a million: the window and 12 ratio-128 entries,
or 320 ratio-4 entries. A star marks what ``tiling.shared_tiling`` chooses, for all layers but those that choose among
ratio-4 entries: in a graph for more than 2,048 tokens their queries have lists of their own and share nothing. Results
are compared before they are timed; times are those of CUDA graphs of several launches on unchanged inputs, so keys come
from L2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.kernels import microseconds
from benchmarks.prompt_attention import TOPK, WINDOW, Prompts, compared, launches
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.targets.fused.attention import HCA_ENTRIES
from nvfp4_sgl.targets.fused.compile_ahead import compile_missing
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.attention import tiling as tilings
from nvfp4_sgl.triton_kernels.attention.tiling import choose_tiling
from nvfp4_sgl.triton_kernels.common import chip

PASSES = ((1, 6), (1, 4), (16, 6), (16, 4), (32, 6), (64, 6), (64, 4), (64, 3), (128, 2))
"""Requests, and queries of each."""
CACHED = {LayerKind.HCA: 1540, LayerKind.CSA: 1280}
"""Tokens in front of each request's queries, by the kind of layer: 12 and 320 entries."""
HCA_COLUMNS = 8192
"""Columns of ratio-128 entries in a graph for a million tokens."""
NAMES = ("one query a program", "blocks inside requests", "blocks across requests")


@dataclass(frozen=True)
class Verified:
    """One case: a pass of ``requests`` requests of ``each`` queries, in a layer of a rank that has ``heads`` heads."""

    requests: int
    each: int
    heads: int
    kind: LayerKind

    def __str__(self) -> str:
        entries = CACHED[self.kind] // self.kind.value
        return f"{self.requests} x {self.each}, {self.heads} heads, {WINDOW} + {entries} keys"

    def runs(self, device: str, cached: int | None = None) -> tuple[dict[str, Callable[[], None]], torch.Tensor]:
        """The three launches by name, and the tensor that each writes."""
        cached = CACHED[self.kind] if cached is None else cached
        torch.manual_seed(0)
        prompts = Prompts(self.requests, self.each, self.kind.value, cached)
        launch, out = launches(prompts, self.heads, device, HCA_COLUMNS)
        block: dict[str, Any] = {"owners": prompts.owners(device), "splits": 1}
        block["tiling"] = tilings.FOUR_QUERIES if self.heads <= 16 else tilings.TWO_QUERIES
        given: list[dict[str, Any]] = [{"expected_extra": self._expected}, {**block, "tokens_each": self.each}, block]
        return {name: partial(launch, **more) for name, more in zip(NAMES, given, strict=True)}, out

    def chosen(self, device: str) -> str:
        """The name of what serving launches."""
        columns = WINDOW, HCA_COLUMNS if self.kind is LayerKind.HCA else TOPK
        sizes = self.requests * self.each, self.heads, columns, chip.processors(torch.device(device))
        agree: dict[str, Any] = {"together": True, "each": self.each, "expected": self._expected}
        return NAMES[choose_tiling(*sizes, packed=True, **agree).queries > 1]

    @property
    def _expected(self) -> int | None:
        return HCA_ENTRIES if self.kind is LayerKind.HCA else None


def cases(heads: Iterable[int]) -> Iterator[Verified]:
    for count in heads:
        for kind in CACHED:
            for requests, each in PASSES:
                yield Verified(requests, each, count, kind)


def variants(heads: Iterable[int], device: str) -> list[ahead.Variant]:
    """The kernels of all cases, without a launch."""
    with ahead.recording() as found:
        for case in cases(heads):
            for run in case.runs(device)[0].values():
                run()
    return list(found)


def line(case: Verified, found: Iterable[tuple[str, float | str]], chosen: str) -> str:
    cells = [us if isinstance(us, str) else f"{us:.1f}{'*' if name == chosen else ''}" for name, us in found]
    return f"| {case} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="launch/bench_verify_attention")
    parser.add_argument("--heads", type=int, nargs="+", default=[32, 16], help="heads of a query, up to 32")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_verify_attention: no CUDA device; it measures, and measures nothing without one")
    major, minor = torch.cuda.get_device_capability()
    with TemporaryDirectory() as folder:
        compile_missing([], variants(arguments.heads, "cuda"), Path(folder), 10 * major + minor)
    print(f"{torch.cuda.get_device_name()}, us of a launch; *: serving's choice")
    print(f"| requests x queries | {' | '.join(NAMES)} |\n|{' --- |' * (len(NAMES) + 1)}")
    failed = False
    for case in cases(arguments.heads):
        runs, out = case.runs("cuda")
        found = list(compared(runs, out, microseconds))
        failed |= any(isinstance(us, str) for _, us in found)
        print(line(case, found, case.chosen("cuda")), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
