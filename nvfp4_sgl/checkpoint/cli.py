"""``nvfp4-sgl tiny`` and ``nvfp4-sgl inspect``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint.tiny import write_tiny
from nvfp4_sgl.checkpoint.tiny_config import TinyFormat
from nvfp4_sgl.checkpoint.verified import verify


def add_tiny_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl tiny``."""
    parser.add_argument("directory", type=Path, help="where to write; created if absent")
    parser.add_argument(
        "--format",
        choices=[format.value for format in TinyFormat],
        default=TinyFormat.NVFP4_FULL.value,
        help="storage of the matrices (default: %(default)s)",
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
    summary = write_tiny(args.directory, args.format, args.seed, force=args.force, **dict(args.overrides))
    print(f"wrote {args.directory} ({args.format}, seed {args.seed})\n{summary.table()}")
    return 0


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl inspect``."""
    parser.add_argument("directory", type=Path, help="checkpoint directory")


def run_inspect(args: argparse.Namespace) -> int:
    """Check names, shapes, dtypes and quantization_config from the headers; print what is stored."""
    print(f"{args.directory}: complete\n{verify(args.directory).summary.table()}")
    return 0


def _assignment(text: str) -> tuple[str, Any]:
    field, separator, value = text.partition("=")
    try:
        if separator:
            return field, json.loads(value)
    except json.JSONDecodeError:
        pass
    raise argparse.ArgumentTypeError(f"expected FIELD=JSON, found '{text}'")
