"""Runs a program of this checkout as ``__main__``; Ctrl-C, streams and errors as in ``nvfp4-sgl``.

``python launch/programs/run.py FILE ARGUMENT...``; FILE is relative to the checkout, and is run as a module of its
package; packages of ``launch`` are imported by their bare names.
"""

import sys


def run(name: str) -> int:
    """Run the program that the command line names; its exit status.

    An error that this package raises on purpose is one line on stderr, and 2.
    """
    import runpy
    from pathlib import Path

    from nvfp4_sgl.arguments import named_here
    from nvfp4_sgl.errors import Nvfp4SglError
    from nvfp4_sgl.files import escaped

    root, program = Path(__file__).resolve().parents[2], Path(sys.argv[1])
    sys.argv[0:2] = [str(root / program)]
    parts = program.with_suffix("").parts
    try:
        runpy.run_module(".".join(parts[parts[0] == "launch" :]), run_name="__main__", alter_sys=True)
    except Nvfp4SglError as error:
        print(escaped(f"{name}: error: {named_here(str(error))}"), file=sys.stderr)
        return 2
    return 0


def main() -> int:
    """The exit status; Ctrl-C is one line from the first import on."""
    name = sys.argv[1].rpartition("/")[2].removesuffix(".py")
    try:
        from nvfp4_sgl.terminal import guarded

        return guarded(f"launch/{name}", lambda: run(f"launch/{name}"))
    except KeyboardInterrupt:
        print(f"\nlaunch/{name}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    launch = __file__.rsplit("/", 2)[0]
    sys.path[:0] = [path for path in (launch, launch.rpartition("/")[0]) if path not in sys.path]
    sys.exit(main())
