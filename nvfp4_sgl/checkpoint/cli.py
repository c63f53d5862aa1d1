"""``nvfp4-sgl tiny`` and ``nvfp4-sgl inspect``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint import checksums
from nvfp4_sgl.checkpoint.tiny import write_tiny
from nvfp4_sgl.checkpoint.tiny_config import TinyFormat, TinyNames
from nvfp4_sgl.checkpoint.verified import Verified, verify


def add_tiny_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl tiny``."""
    parser.add_argument("directory", type=Path, help="where to write; created if absent")
    parser.add_argument(
        "--format",
        choices=[format.value for format in TinyFormat],
        default=TinyFormat.NVFP4_FULL.value,
        help="storage of the matrices (default: %(default)s)",
    )
    parser.add_argument(
        "--names",
        choices=[names.value for names in TinyNames],
        default=TinyNames.ORIGINAL.value,
        help="of the tensors (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace a tiny checkpoint that is already there")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="FIELD=JSON",
        type=_assignment,
        action="append",
        default=[],
        help="replace a field of config.json, e.g. --set index_topk=512; may be repeated",
    )


def run_tiny(args: argparse.Namespace) -> int:
    """Write the checkpoint and print what is in it."""
    overrides = dict(args.overrides)
    summary = write_tiny(args.directory, args.format, args.seed, force=args.force, names=args.names, **overrides)
    print(f"wrote {args.directory} ({args.format}, seed {args.seed})\n{summary.table()}")
    return 0


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl inspect``."""
    parser.add_argument("directory", type=Path, help="checkpoint directory")
    parser.add_argument(
        "--scales",
        action="store_true",
        help="read the scales of MXFP4 matrices too, and list those that NVFP4 cannot hold exactly",
    )
    parser.add_argument(
        "--checksums", action="store_true", help="hold every tensor against the manifest that 'convert' wrote"
    )


def run_inspect(args: argparse.Namespace) -> int:
    """Check names, shapes, dtypes and what exporters say of them from the headers; print what is stored.

    With ``--scales`` return 1 if an MXFP4 matrix has no exact NVFP4 form, with ``--checksums`` if a tensor is not what
    was written.
    """
    verified = verify(args.directory)
    print(f"{args.directory}: complete\n{verified.summary.table()}")
    status = _check_checksums(verified) if args.checksums else 0
    if not args.scales:
        return status
    total = sum(storage.is_converted for storage in verified.summary.storages.values())
    problems = verified.reader().problems()
    print(f"MXFP4 read as NVFP4, every value as it is: {total - len(problems)} of {total} matrices")
    for stem, reason in problems.items():
        print(f"  not exact: {stem}: {reason}")
    return 1 if problems else status


def _check_checksums(verified: Verified) -> int:
    problems = checksums.check(verified.inventory)
    total = len(verified.inventory.entries)
    print(
        f"checksums: {len(problems)} problems in {total} tensors"
        if problems
        else f"checksums: all {total} tensors match"
    )
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


def _assignment(text: str) -> tuple[str, Any]:
    field, separator, value = text.partition("=")
    try:
        if separator:
            return field, json.loads(value)
    except json.JSONDecodeError:
        pass
    raise argparse.ArgumentTypeError(f"expected FIELD=JSON, found '{text}'")
