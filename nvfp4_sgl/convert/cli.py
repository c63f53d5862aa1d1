"""``nvfp4-sgl convert``."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable
from typing import Any

from nvfp4_sgl import __version__
from nvfp4_sgl.arguments import add_checkpoint, add_json, add_output, print_json
from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.config import require_checkpoint
from nvfp4_sgl.convert.folder import describe, require_apart, require_usable
from nvfp4_sgl.convert.options import Options, Scales, parse_classes, parse_size
from nvfp4_sgl.errors import INTERRUPTED, UnsupportedError
from nvfp4_sgl.targets.driver import sees_gpu


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``nvfp4-sgl convert``."""
    names = ", ".join(kind.value for kind in MatrixClass)
    parser.description = (
        "Write a checkpoint with its large matrices in NVFP4. After an interruption the same command resumes."
    )
    add_checkpoint(parser, more=", in any format that is read")
    add_output(parser, "where to write: new, empty, or a conversion begun")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--only",
        metavar="CLASS,…",
        type=_checked(parse_classes),
        help=f"classes of matrices to convert, of {names} (default: all)",
    )
    chosen.add_argument(
        "--keep", metavar="CLASS,…", type=_checked(parse_classes), help="classes to leave as they are stored"
    )
    parser.add_argument(
        "--scales",
        choices=[scales.value for scales in Scales],
        default=Scales.MAX.value,
        help="block scales by a block's maximum, as ModelOpt does, or by its squared error (default: %(default)s)",
    )
    parser.add_argument(
        "--tie-gate-up",
        action="store_true",
        help="one global scale for gate and up of an expert: other engines need it, this one does not",
    )
    parser.add_argument(
        "--drafts",
        choices=["keep", "nvfp4"],
        default="keep",
        help="keep drafts (mtp.*) byte for byte, or convert these classes in them, too; an engine that drafts must"
        " then read NVFP4 (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-size",
        metavar="SIZE",
        type=_checked(parse_size),
        default="5GB",
        help="largest size of a file (default: %(default)s)",
    )
    parser.add_argument("--device", help="cpu or cuda[:N], for the arithmetic (default: a GPU if there is one)")
    parser.add_argument("--jobs", metavar="N", type=_count, help="files written at once (default: cores, at most 8)")
    parser.add_argument("--dry-run", action="store_true", help="say what would happen to each class, and end")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Convert; 130 if interrupted."""
    everything = frozenset(MatrixClass)
    options = Options(
        classes=args.only or everything - (args.keep or frozenset()),
        scales=Scales(args.scales),
        tie_gate_up=args.tie_gate_up,
        shard_size=args.shard_size,
        drafts=args.drafts == "nvfp4",
    )
    # All that can be refused is refused before torch is imported, which takes seconds.
    require_checkpoint(args.directory)
    require_apart(args.directory, args.output)
    if args.device:
        check_device(args.device)
    if not args.dry_run:
        require_usable(args.output, describe(args.directory, options.as_json(), __version__))

    from nvfp4_sgl.convert.run import convert

    try:
        # With --json stdout is for the document alone.
        with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
            tally = convert(
                args.directory, args.output, options, device=args.device, jobs=args.jobs, dry_run=args.dry_run
            )
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to go on", file=sys.stderr)
        return INTERRUPTED
    if args.json:
        print_json(
            {
                "directory": str(args.directory),
                "output": str(args.output),
                "dry_run": args.dry_run,
                "options": options.as_json(),
                "losses": None if tally is None else tally.losses(),
            }
        )
    return 0


def check_device(name: str) -> None:
    """Refuse an unknown device, or a GPU where there is none."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name, re.ASCII):
        raise UnsupportedError(f"--device {name}: expected cpu, cuda or cuda:N")
    if name != "cpu" and not sees_gpu():
        raise UnsupportedError(f"--device {name}: no such GPU here; leave the flag out, or pass --device cpu")


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 1024, found '{text}'")
    return int(text)
