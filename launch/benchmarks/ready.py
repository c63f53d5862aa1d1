"""Times of whole Flash, with dummy weights, from loaded weights to ready: with no compiled kernels, and with all.

Run as ``python -m benchmarks.ready empty|filled`` with ``launch`` on PYTHONPATH, ``empty`` first: ``filled`` finds its
kernels. The folder of kernels is this package's and Triton's; what SGLang compiles for itself is compiled before the
weights are loaded, and stays where it is. The last line is the verdict; exit status 1 if the goal was missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.flash import LAYERS
from benchmarks.full_size import ROOT, environment, measure, with_defaults
from benchmarks.full_size_plan import Start

GOALS = {"empty": 90.0, "filled": 25.0}
"""Seconds from loaded weights to ready."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.ready", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cache", choices=GOALS, help="what the folder of kernels holds at the start")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "ready", metavar="OUT", help="kernels, logs and results"
    )
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="tensor-parallel size")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--flags", default="", help="further flags of the server")
    arguments = parser.parse_args()
    kernels = arguments.output / "kernels"
    if arguments.cache == "empty":
        shutil.rmtree(kernels, ignore_errors=True)
    elif not any(kernels.glob("*")):
        sys.exit(f"{kernels}: expected compiled kernels, found none; run `empty` first")
    found = started(arguments, kernels)
    (arguments.output / f"{arguments.cache}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    good, words = verdict(arguments.cache, found)
    print(words, flush=True)
    return 0 if good else 1


def started(arguments: argparse.Namespace, kernels: Path) -> dict[str, Any]:
    """The findings of :func:`.full_size.measure` for a server that is asked for nothing."""
    asked_for_nothing = Start("ours", ())
    with environment(XDG_CACHE_HOME=str(kernels), TRITON_CACHE_DIR=str(kernels / "triton")):
        return dict(measure(asked_for_nothing, with_defaults(**vars(arguments)), asked_for_nothing.names))


def verdict(cache: str, found: dict[str, Any]) -> tuple[bool, str]:
    """Whether the goal was met, and a line that says so."""
    seconds = found["start"]["ready after weights"]
    good = seconds is not None and seconds <= GOALS[cache]
    said = "no line of its log names the weights" if seconds is None else f"ready {seconds:.0f} s after weights"
    words = f"{cache} cache: {said} (goal {GOALS[cache]:.0f}), {found['ready after']:.0f} s in all"
    return good, f"{'pass' if good else 'FAIL'}: {words}"


if __name__ == "__main__":
    sys.exit(main())
