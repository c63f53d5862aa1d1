"""The interpreter as the tests speed it up: the values are the same, and a launch puts back what it replaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.support import interpreter_speed
from tests.support.interpreted import INTERPRETED
from tests.triton.support.many_operations import results

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="for the interpreter")


@triton.jit
def _inner(x, y, OPERATION: tl.constexpr):
    if OPERATION == 0:
        return x + y
    elif OPERATION == 1:
        return x - y
    elif OPERATION == 2:
        return x * y
    else:
        tl.static_assert(False)


@triton.jit
def _kernel(x, y, out, OPERATION: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(out + at, _inner(tl.load(x + at), tl.load(y + at), OPERATION))


def run(x: list[float], y: list[float], operation: int, dtype: torch.dtype) -> list[float]:
    out = torch.zeros(4, dtype=dtype)
    _kernel[(1,)](torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype), out, OPERATION=operation)
    found: list[float] = out.tolist()
    return found


@pytest.mark.parametrize(
    ("dtype", "operation", "x", "y", "expected"),
    [
        (torch.int32, 0, 2**31 - 1, 1, -(2**31)),
        (torch.int32, 2, 2**16, -(2**15), -(2**31)),
        (torch.uint8, 1, 0, 1, 255),
        (torch.float32, 2, 1.5, -3.0, -4.5),
    ],
)
def test_values(dtype: torch.dtype, operation: int, x: float, y: float, expected: float) -> None:
    assert run([x] * 4, [y] * 4, operation, dtype) == [expected] * 4


def test_a_launch_leaves_the_language_as_it_was() -> None:
    before = tl.load, tl.tensor.__add__, tl.range
    run([1] * 4, [2] * 4, 0, torch.int32)
    with pytest.raises(InterpreterError):
        run([1] * 4, [2] * 4, 3, torch.int32)
    assert before == (tl.load, tl.tensor.__add__, tl.range) and not hasattr(tl.tensor, "__index__")


def test_the_plain_interpreter_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so few recordings kept that they are dropped midway, while calls are recorded, and by recordings alone."""
    command = [sys.executable, "-m", "tests.triton.support.many_operations", str(tmp_path / "plain.pt")]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[2])
    plain = torch.load(tmp_path / "plain.pt")
    for most in (10, interpreter_speed.MAX_RECORDINGS, interpreter_speed.MAX_RECORDINGS):
        monkeypatch.setattr(interpreter_speed, "MAX_RECORDINGS", most)
        assert torch.equal(results(), plain)
