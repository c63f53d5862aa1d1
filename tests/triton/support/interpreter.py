"""What the interpreter and the emulator do differently on request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from torch import Tensor
from triton.runtime import interpreter

from tests.support.interpreted import EMULATED, INTERPRETED


def run_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the programs of every launch run last first; skips a test on a GPU."""
    if EMULATED:
        from tests.sm100.support.triton_launch import current_emulator

        emulator = current_emulator()
        monkeypatch.setattr(emulator, "options", replace(emulator.options, backwards=True))
        return
    if not INTERPRETED:
        pytest.skip("a GPU's order is its own")
    builder, forwards = interpreter.interpreter_builder, interpreter.InterpreterBuilder.set_grid_idx

    def backwards(x: int, y: int, z: int) -> None:
        forwards(builder, *(size - 1 - i for size, i in zip(builder.grid_dim, (x, y, z), strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", backwards)


def mapped(tensors: Iterable[Tensor]) -> None:
    """Let kernels touch tensors of which they get the addresses alone, as of another GPU's memory.

    The emulator knows no memory but arguments'.
    """
    from tests.sm100.support.triton_launch import current_emulator

    emulator = None if INTERPRETED else current_emulator()
    if emulator is not None:
        emulator.mapped += tensors
