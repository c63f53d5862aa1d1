"""Where the ``nvfp4-sgl`` script begins: Ctrl-C is one line from the first import on, not a traceback."""

import sys

from nvfp4_sgl.errors import INTERRUPTED


def interrupted() -> int:
    """Say so; the exit status."""
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
