"""``python -m nvfp4_sgl.cutedsl_kernels.build``: compile every kernel that a model can need into a library.

The kernels depend on a model's SwiGLU clamp alone, not on its sizes, so one library serves any number of tokens and any
split over GPUs. Building needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .compiled import ARCHITECTURES
from .library import build
from .plan import every_key


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, or those of the process."""
    parser = argparse.ArgumentParser(prog="nvfp4_sgl.cutedsl_kernels.build", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where to write the library")
    parser.add_argument("--architecture", nargs="+", choices=ARCHITECTURES, default=["sm_100a"])
    parser.add_argument("--limit", type=float, required=True, help="the model's swiglu_limit")
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"], help="of results")
    chosen = parser.parse_args(arguments)
    keys = [key for name in chosen.architecture for key in every_key(name, chosen.limit, tuple(chosen.dtype))]
    build(keys, chosen.output)
    print(f"{chosen.output}: {len(keys)} kernels for {', '.join(chosen.architecture)}")


if __name__ == "__main__":
    main()
