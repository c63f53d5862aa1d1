"""Attention that others wrote for SM100 hardware gives the right numbers in the emulator: A in tensor memory, FP8."""

from __future__ import annotations

import pytest

from tests.sm100.emulator import Options
from tests.sm100.support.attention import run_attention
from tests.support.full import but_for

pytest.importorskip("flashinfer")

CASES = {
    "fp16": (("Float16", "Float16", 200, 150, 64), 2e-3, "f16"),
    "E4M3": (("Float8E4M3FN", "Float16", 256, 200, 64), 0.05, "f8f6f4"),
}
"""Element types, queries, keys and width; a bound on errors, since probabilities are rounded, too; the kind."""


@pytest.mark.parametrize("case", but_for(CASES, "fp16"))
def test_output_is_close(case: str) -> None:
    sizes, bound, kind = CASES[case]
    found, expected, statistics = run_attention(*sizes, Options("random", 1))
    assert (found - expected).abs().max() < bound
    assert expected.abs().max() > 10 * bound
    assert any("tcgen05.mma" in opcode and f"kind::{kind}" in opcode for opcode in statistics.by_opcode())
