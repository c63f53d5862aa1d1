"""Runs a program of this checkout as ``__main__``; Ctrl-C and streams as in ``nvfp4-sgl``.

``python launch/programs/run.py FILE ARGUMENT...``; FILE is relative to the checkout, and is run as a module of its
package; packages of ``launch`` go by their bare names.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the program that the command line names; its exit status."""
    program = Path(sys.argv[1])
    sys.argv[0:2] = [str(ROOT / program)]
    parts = program.with_suffix("").parts
    runpy.run_module(".".join(parts[parts[0] == "launch" :]), run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.path[:0] = [path for path in (str(ROOT / "launch"), str(ROOT)) if path not in sys.path]
    from nvfp4_sgl.terminal import guarded

    sys.exit(guarded(f"launch/{Path(sys.argv[1]).stem}", main))
