"""``nvfp4-sgl verify``."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from nvfp4_sgl.arguments import add_checkpoint, add_json, add_threads
from nvfp4_sgl.config import require_checkpoint
from nvfp4_sgl.reports.thresholds import MAX_BLOCK, MAX_RMS, Thresholds
from nvfp4_sgl.terminal import fitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl verify``."""
    add_checkpoint(parser)
    parser.add_argument("--against", type=Path, metavar="SRC", help="the checkpoint that DIR was made from")
    parser.add_argument(
        "--max-rms",
        type=_limit,
        default=MAX_RMS,
        metavar="X",
        help="relative RMS error accepted of a matrix that may differ (default: %(default)s, for NVFP4)",
    )
    parser.add_argument(
        "--max-block",
        type=_limit,
        default=MAX_BLOCK,
        metavar="X",
        help="largest error accepted in a block of 16, relative to its largest value (default: %(default)s, for NVFP4)",
    )
    parser.add_argument(
        "--lossy",
        action="store_true",
        help="apply these bounds also to matrices whose storage could hold SRC's values without loss",
    )
    add_json(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots by layer and class too")
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report, the verdict last; 0 if DIR is right, 1 if it is wrong.

    What is no checkpoint raises, and a SRC that cannot be read.
    """
    for directory in (args.directory, args.against):
        if directory is not None:
            require_checkpoint(directory)

    if args.html is not None:
        args.html.touch()  # what cannot be written is told now, not after hours of reading

    from nvfp4_sgl.reports import html_report, verification

    thresholds = Thresholds(args.max_rms, args.max_block, args.lossy)
    found = verification.verify_checkpoint(args.directory, args.against, thresholds, threads=args.threads)
    if args.html is not None:
        args.html.write_text(html_report.page(found), encoding="utf-8")
    print(json.dumps(found.as_json(), indent=2, allow_nan=False) if args.json else fitted("\n".join(found.lines())))
    return 1 if found.problems else 0


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if 0 <= value < math.inf:
        return value
    raise argparse.ArgumentTypeError(f"expected a number of at least 0, found '{text}'")
