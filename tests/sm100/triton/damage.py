"""Mistakes planted in what Triton compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from triton.compiler import CompiledKernel

from tests.sm100.emulator.ptx import Kernel, parse
from tests.sm100.support import triton_launch


def damage(monkeypatch: pytest.MonkeyPatch, kernel: str, old: str, new: str) -> None:
    """Replace ``old`` wherever it occurs in the PTX of a kernel."""

    def damaged(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    change(monkeypatch, kernel, damaged)


def leave_out(monkeypatch: pytest.MonkeyPatch, kernel: str, instruction: str, number: int) -> None:
    """Leave one of the places of an instruction out of the PTX of a kernel, the first is 0."""

    def damaged(text: str) -> str:
        parts = text.split(instruction)
        assert number < len(parts) - 1
        return instruction.join(parts[: number + 1]) + "//" + instruction.join(["", *parts[number + 1 :]])

    change(monkeypatch, kernel, damaged)


def change(monkeypatch: pytest.MonkeyPatch, kernel: str, damaged: Callable[[str], str]) -> None:
    """Have the emulator run what ``damaged`` makes of the PTX of a kernel."""

    def changed(compiled: CompiledKernel) -> Kernel:
        text = compiled.asm["ptx"]
        if compiled.metadata.name == kernel:
            text = damaged(text)
        return parse(text).kernels[compiled.metadata.name]

    monkeypatch.setattr(triton_launch, "parsed", changed)
