"""Python calls that a pass makes for each of its launches: what the host adds to every kernel.

``TRITON_INTERPRET=1 python -m tests.support.python_calls`` prints them for a 512-token pass of a tiny model on each GPU
target. Nothing is executed: launches are counted and dropped. Calls inside a launch are Triton's and are left out.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import InterpretedFunction

from nvfp4_sgl.cutedsl_kernels.common.call import GemmCall
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support import native
from tests.support.reference_gemms import DryLauncher, dry_gemms

TOKENS = 512
LAYERS = 3
"""One of each kind."""
SHOWN = 12
"""Files that the report lists."""


@dataclass
class Counts:
    """Launches of kernels and GEMMs, and Python calls by file."""

    launches: int = 0
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def each(self) -> float:
        """Python calls a launch."""
        return self.calls.total() / self.launches


@contextmanager
def counting() -> Iterator[Counts]:
    """Count inside the block; nothing is launched."""
    counts = Counts()

    def kernel(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        counts.launches += 1

    def gemm(self: DryLauncher, key: KernelKey, call: GemmCall, clusters: int) -> None:
        counts.launches += 1

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            counts.calls[frame.f_code.co_filename] += 1

    with mock.patch.object(InterpretedFunction, "run", kernel), mock.patch.object(DryLauncher, "launch", gemm):
        sys.setprofile(profile)
        try:
            yield counts
        finally:
            sys.setprofile(None)


@torch.no_grad()
def of_pass(checkpoint: Path, run: native.Run, tokens: int = TOKENS) -> Counts:
    """Of the second of two equal passes, planning included: what is made once is there."""
    with dry_gemms(run.target):
        model = Standalone(checkpoint, target=run.target, mode=run.mode, requests=1, capacity=2 * tokens)
        for _ in range(2):
            model.reset()
            with counting() as counts:
                model.extend({0: [7] * tokens})
    return counts


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for form in ("nvfp4-full", "nvfp4-experts"):
            path = Path(folder) / form
            write_tiny(path, form, seed=3, num_hidden_layers=LAYERS, n_routed_experts=6)
            for run in native.runs(on_gpu=False):
                counts = of_pass(path, run)
                print(
                    f"{form} {run}: {counts.launches} launches, {counts.calls.total()} Python calls,"
                    f" {counts.each:.1f} a launch"
                )
                for file, calls in counts.calls.most_common(SHOWN):
                    print(f"    {calls / counts.launches:6.1f}  {'/'.join(Path(file).parts[-3:])}")


if __name__ == "__main__":
    main()
