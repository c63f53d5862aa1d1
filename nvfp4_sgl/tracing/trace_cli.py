"""``nvfp4-sgl trace``: the first op in which two recorded runs of a server depart."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path

from nvfp4_sgl.arguments import add_json
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.tracing.diff import Difference, differences

BOUND = 0.1
"""Estimated error that roundings of bf16 do not reach within some layers; those of FP4 activations do."""
SHOWN_RISES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl trace``."""
    parser.description = "Records: NVFP4_SGL_TRACE=FOLDER at a server's start; a file for each rank."
    parser.add_argument("first", type=Path, metavar="A", help="record of the run to compare with")
    parser.add_argument("second", type=Path, metavar="B", help="record of the other run, of the same requests")
    parser.add_argument("--bound", type=float, default=BOUND, help=f"error of an op that departs (default: {BOUND})")
    parser.add_argument("--exact", action="store_true", help="an op departs if any bit does")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 if an op departs."""
    found = list(differences(args.first, args.second))
    if not found:
        raise ConfigError(f"{args.first}, {args.second}: expected at least a pass in both, found none")
    first = next((each for each in found if departs(each, args.bound, args.exact)), None)
    if args.json:
        print(json.dumps({"departs": first and asdict(first), "ops": [asdict(each) for each in found]}))
    else:
        print(report(found, first, args.bound))
    return 1 if first else 0


def departs(each: Difference, bound: float, exact: bool) -> bool:
    return each.error > bound or (exact and not each.equal)


def report(found: list[Difference], first: Difference | None, bound: float) -> str:
    """What departs, what other bits begin with, and where errors grow most from one op to the next."""
    passes = found[-1].number + 1
    lines = [f"{len(found)} ops in {passes} passes, {sum(each.equal for each in found)} equal bit for bit"]
    other = next((each for each in found if not each.equal), None)
    if other is not None:
        lines.append(f"first with other bits: pass {other.number}, {other.name}, error {other.error:.2g}")
    if first is None:
        lines.append(f"no op departs: errors are at most {max(each.error for each in found):.2g} (bound {bound:g})")
    else:
        why = (
            first.why
            or f"error {first.error:.2g}, {'beyond' if first.error > bound else 'bits differ; bound'} {bound:g}"
        )
        lines.append(f"the first that departs: pass {first.number}, {first.name}: {why}")
    rises = sorted(_rises(found), reverse=True)[:SHOWN_RISES]
    lines += [f"  error grows {before:.2g} to {after:.2g}: pass {n}, {name}" for _, before, after, n, name in rises]
    return "\n".join(lines)


def _rises(found: list[Difference]) -> list[tuple[float, float, float, int, str]]:
    pairs = itertools.pairwise(found)
    finite = [(a, b) for a, b in pairs if a.number == b.number and math.isfinite(a.error) and math.isfinite(b.error)]
    return [(b.error - a.error, a.error, b.error, b.number, b.name) for a, b in finite if b.error > a.error]
