"""Where the ``nvfp4-sgl`` script begins: Ctrl-C is one line from the first import on, not a traceback."""

import sys

from nvfp4_sgl.errors import INTERRUPTED


def main() -> int:
    """:func:`nvfp4_sgl.cli.main`, whose imports can be interrupted, too."""
    try:
        from nvfp4_sgl import cli

        return cli.main()
    except KeyboardInterrupt:
        print("\nnvfp4-sgl: interrupted", file=sys.stderr)
        return INTERRUPTED
