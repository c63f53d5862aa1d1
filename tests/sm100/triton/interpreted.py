"""Runs cases in Triton's interpreter and saves their outputs: ``python -m tests.sm100.triton.interpreted FILE NAME…``.

The interpreter is chosen by an environment variable for a whole process, in which nothing can be compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.sm100.triton.cases.case import Outputs
from tests.support import interpreter_speed

ROOT = Path(__file__).parents[3]


def interpreted(names: Iterable[str], folder: Path) -> dict[str, Outputs]:
    """Outputs of cases, computed in a process of their own.

    Raises:
        RuntimeError: with its output, if it fails.
    """
    file = folder / "interpreted.pt"
    command = [sys.executable, "-m", __name__, str(file), *names]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the interpreter failed\n{done.stdout}{done.stderr}")
    return torch.load(file)


if __name__ == "__main__":
    from tests.sm100.triton.cases import CASES

    interpreter_speed.install()
    torch.save({name: CASES[name].compute() for name in sys.argv[2:]}, sys.argv[1])
