"""The ``nvfp4-sgl`` command: a table of subcommands, each imported only when it is called."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from nvfp4_sgl import __version__
from nvfp4_sgl.arguments import named_here
from nvfp4_sgl.errors import Nvfp4SglError
from nvfp4_sgl.files import escaped
from nvfp4_sgl.terminal import guarded


@dataclass(frozen=True)
class Command:
    """A subcommand: ``module`` defines ``add_arguments`` (of a parser) and ``run`` (namespace -> exit status)."""

    summary: str
    module: str


COMMANDS = {
    "tiny": Command(
        "write a tiny random DeepSeek-V4 checkpoint",
        "nvfp4_sgl.synthetic.tiny_cli",
    ),
    "inspect": Command(
        "verify a checkpoint directory and summarise what it stores",
        "nvfp4_sgl.reports.inspect_cli",
    ),
    "verify": Command(
        "check a checkpoint's values, and compare it with the one it was made from",
        "nvfp4_sgl.reports.verify_cli",
    ),
    "convert": Command("write a checkpoint with its large matrices in NVFP4", "nvfp4_sgl.convert.cli"),
    "build": Command("compile a checkpoint's kernels ahead of time, on any machine", "nvfp4_sgl.build_cli"),
    "layertest": Command("run one layer here beside the CPU reference, op by op", "nvfp4_sgl.tracing.layer_cli"),
    "trace": Command("name the first op in which two recorded runs of a server depart", "nvfp4_sgl.tracing.trace_cli"),
    "doctor": Command("print versions, device and which implementation of every op runs here", "nvfp4_sgl.doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``nvfp4-sgl ARGV`` and return its exit status.

    0 is success; 1 is what a subcommand found wrong; 2 is a wrong command line, or an :class:`Nvfp4SglError`, printed
    as one line; 130 is Ctrl-C. Any other exception is a defect and keeps its traceback.
    """
    return guarded("nvfp4-sgl", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    namespace = argparse.Namespace()
    try:
        namespace = build_parser(chosen=arguments[0] if arguments else None).parse_args(arguments)
        return namespace.run(namespace) or 0
    except Nvfp4SglError as error:
        message = str(error)
        if "ranks" in namespace:
            message = named_here(message)
        print(escaped(f"nvfp4-sgl: error: {message}"), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing is left to say, at interpreter shutdown neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        print(escaped(f"nvfp4-sgl: error: {where}{error.strerror}"), file=sys.stderr)
        return 2


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser with every subcommand's name, and the arguments of ``chosen`` alone (its module is imported)."""
    parser = argparse.ArgumentParser(prog="nvfp4-sgl", description="DeepSeek-V4 on SGLang in native NVFP4.")
    parser.add_argument("--version", action="version", version=f"nvfp4-sgl {__version__}")
    subparsers = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.summary, description=command.summary, allow_abbrev=False)
        if name == chosen:
            module = importlib.import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
