"""``nvfp4-sgl inspect``."""

from __future__ import annotations

import argparse
import json

from nvfp4_sgl.arguments import add_checkpoint, add_json, add_threads, print_json
from nvfp4_sgl.checkpoint import checksums
from nvfp4_sgl.checkpoint.beside import check_beside
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import Nvfp4SglError
from nvfp4_sgl.reports.inspection import broken_as_json, inspect
from nvfp4_sgl.terminal import fitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl inspect``."""
    add_checkpoint(parser)
    parser.add_argument("--values", action="store_true", help="read all tensors, and check what they hold")
    parser.add_argument(
        "--scales",
        action="store_true",
        help="read the scales alone, a tenth of the bytes: their ranges, and MXFP4 matrices that NVFP4 cannot hold",
    )
    add_json(parser)
    add_threads(parser)
    parser.add_argument(
        "--checksums", action="store_true", help="compare every tensor with the checksums that 'convert' wrote"
    )


def run(args: argparse.Namespace) -> int:
    """Check names, shapes, dtypes and what exporters say of them, and with flags values; print what is stored.

    Return 1 if something is wrong with the values or the checksums, or if no target serves what is stored. What is
    wrong before that raises; with ``--json`` it is printed, too.
    """
    try:
        verified, found, of_draft = verify(args.directory), None, None
        check_beside(args.directory, verified.config.vocab_size)
        if args.values or args.scales:
            from nvfp4_sgl.checkpoint.scan import scan, scan_draft

            found = scan(verified, whole=args.values, threads=args.threads)
            of_draft = scan_draft(verified, whole=args.values, threads=args.threads)
        differing = checksums.check(verified.inventory) if args.checksums else None
        inspection = inspect(verified, found, differing, of_draft)
    except Nvfp4SglError as error:
        if args.json:
            print_json(broken_as_json(args.directory, error))
        raise
    print(
        json.dumps(inspection.as_json(), indent=2, allow_nan=False)
        if args.json
        else fitted("\n".join(inspection.lines()))
    )
    return 1 if inspection.problems else 0
