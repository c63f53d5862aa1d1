"""``nvfp4-sgl tiny`` and ``nvfp4-sgl inspect``."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from typing import Any

from nvfp4_sgl.arguments import add_checkpoint, add_json, add_output, add_seed, add_threads, print_json
from nvfp4_sgl.checkpoint.tiny_config import TinyFormat, TinyNames
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import Nvfp4SglError
from nvfp4_sgl.terminal import Counter, fitted


def add_tiny_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl tiny``."""
    add_output(parser, "where to write; created if absent")
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
    add_seed(parser, "the random weights")
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
    parser.add_argument(
        "--no-check", action="store_true", help="write it only: do not inspect it, nor generate with it on the CPU"
    )
    add_json(parser)


def run_tiny(args: argparse.Namespace) -> int:
    """Write the checkpoint and print what is in it."""
    from nvfp4_sgl.checkpoint.tiny import write_tiny
    from nvfp4_sgl.try_out import try_out

    overrides = dict(args.overrides)
    progress = Counter("tensors drawn:")
    try:
        summary = write_tiny(
            args.output,
            args.format,
            args.seed,
            force=args.force,
            names=args.names,
            progress=progress,
            **overrides,
        )
    finally:
        progress.end()
    made = {
        "directory": str(args.output),
        "format": args.format,
        "names": args.names,
        "seed": args.seed,
        "bytes": summary.nbytes,
    }
    shown = None if args.no_check else try_out(args.output, args.seed)
    serve = f"python -m sglang.launch_server --model-path {shlex.quote(str(args.output))}"
    if args.json:
        print_json(made | {"check": shown and asdict(shown), "next": serve})
    else:
        print(f"wrote {args.output} ({args.format}, seed {args.seed})\n{summary.table()}")
        if shown is not None:
            print("\n".join(shown.lines()))
        print(f"next: {serve}")
    return 0


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--checksums", action="store_true", help="hold every tensor against the manifest that 'convert' wrote"
    )


def run_inspect(args: argparse.Namespace) -> int:
    """Check names, shapes, dtypes and what exporters say of them, and with flags values; print what is stored.

    Return 1 if something is wrong with the values or the checksums, or if no target serves what is stored. What is
    wrong before that raises; with ``--json`` it is printed and 2 is returned.
    """
    from nvfp4_sgl.checkpoint import checksums
    from nvfp4_sgl.checkpoint.beside import check_beside
    from nvfp4_sgl.checkpoint.inspection import broken_as_json, inspect

    try:
        verified, found = verify(args.directory), None
        check_beside(args.directory, verified.config.vocab_size)
        if args.values or args.scales:
            from nvfp4_sgl.checkpoint.scan import scan

            found = scan(verified, whole=args.values, threads=args.threads)
        inspection = inspect(verified, found, checksums.check(verified.inventory) if args.checksums else None)
    except Nvfp4SglError as error:
        if not args.json:
            raise
        print_json(broken_as_json(args.directory, error))
        return 2
    print(
        json.dumps(inspection.as_json(), indent=2, allow_nan=False)
        if args.json
        else fitted("\n".join(inspection.lines()))
    )
    return 1 if inspection.problems else 0


def _assignment(text: str) -> tuple[str, Any]:
    field, separator, value = text.partition("=")
    try:
        if separator:
            return field, json.loads(value)
    except json.JSONDecodeError:
        pass
    raise argparse.ArgumentTypeError(f"expected FIELD=JSON, found '{text}'")
