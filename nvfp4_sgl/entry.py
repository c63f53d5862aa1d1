"""Entry of the ``nvfp4-sgl`` script: from the first import on, Ctrl-C gives one line instead of a traceback."""

import sys

from nvfp4_sgl.errors import INTERRUPTED


def interrupted() -> int:
    """Print that the command was interrupted; returns the exit status."""
    print("\nnvfp4-sgl: interrupted", file=sys.stderr)
    return INTERRUPTED


try:
    from nvfp4_sgl import cli
except KeyboardInterrupt:
    sys.exit(interrupted())


def main() -> int:
    """:func:`nvfp4_sgl.cli.main`."""
    try:
        return cli.main()
    except KeyboardInterrupt:
        return interrupted()
