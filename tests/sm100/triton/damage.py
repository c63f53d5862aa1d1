"""Mistakes planted in what Triton compiled."""

from __future__ import annotations

import pytest
from triton.compiler import CompiledKernel

from tests.sm100.emulator.ptx import Kernel, parse
from tests.sm100.support import triton_launch


def damage(monkeypatch: pytest.MonkeyPatch, kernel: str, old: str, new: str) -> None:
    """Replace ``old`` wherever it occurs in the PTX of a kernel."""

    def damaged(compiled: CompiledKernel) -> Kernel:
        text = compiled.asm["ptx"]
        if compiled.metadata.name == kernel:
            assert old in text
            text = text.replace(old, new)
        return parse(text).kernels[compiled.metadata.name]

    monkeypatch.setattr(triton_launch, "parsed", damaged)
