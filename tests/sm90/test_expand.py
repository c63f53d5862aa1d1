"""The kernel's expansion of NVFP4 to bf16, executed: every code with every block scale, bit for bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.sm90.expand import VALUE_SHIFT
from nvfp4_sgl.cutedsl_kernels.sm90.layout import pack_tiles
from tests.sm90.support.expansion import Expansion
from tests.sm100.emulator import Compiled, compile_for, emulated
from tests.support.numpy_nvfp4 import E2M1, E4M3


@functools.cache
def compiled() -> Compiled:
    return compile_for("sm_90a", Expansion(), *Expansion.example())


def expand(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """fp64 [128, 128] of one tile: each lane's registers, put where wgmma takes them from."""
    packed = pack_tiles(codes, scales.view(torch.float8_e4m3fn)).flatten()
    registers = torch.zeros(8, 32, 8, 4, dtype=torch.int32)
    with emulated(reads=[packed], writes=[registers]) as emulator:
        emulator(compiled(), *Expansion.arguments(packed, registers))
    pairs = registers.numpy().view("<u2").astype(np.uint32) << 16
    values = pairs.view(np.float32).reshape(8, 8, 4, 8, 2, 2, 2)  # warp, g, t, step, k half, row half, low or high
    return values.transpose(0, 5, 1, 3, 4, 2, 6).reshape(128, 128).astype(np.float64)


def test_all_codes_with_all_scales() -> None:
    """16 codes times 127 scales, at each of the places of a tile."""
    seen = np.zeros((16, 127, 2), bool)
    for turn in range(2):
        blocks = (np.arange(128 * 8).reshape(128, 8) * 5 + turn * 64) % 127
        nibbles = (np.arange(128 * 128).reshape(128, 128) * 7 + np.arange(128)[:, None] + turn) % 16
        codes = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).astype(np.uint8)
        found = expand(torch.from_numpy(codes), torch.from_numpy(blocks.astype(np.uint8)))
        signs = np.where(nibbles & 8, -1.0, 1.0)
        exact = signs * E2M1[nibbles & 7] * np.repeat(E4M3[blocks], 16, axis=1) * 2.0**-VALUE_SHIFT
        assert np.array_equal(found, exact)
        assert np.array_equal(np.signbit(found), np.signbit(signs)), "-0 stays -0"
        seen[nibbles, np.repeat(blocks, 16, axis=1), turn] = True
    assert seen.any(-1).all(), "a combination was left out"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0x4140", "0x4141"),  # another row's scale
        ("0x4342", "0x4140"),  # another step's scales
        ("mov.b32 both, {f1, f1}", "mov.b32 both, {f0, f0}"),
    ],
)
def test_a_wrong_expansion_is_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = compiled()
    count = right.ptx.count(old)
    assert count
    monkeypatch.setitem(globals(), "compiled", lambda: right.patched(old, new, count))
    with pytest.raises(AssertionError):
        test_all_codes_with_all_scales()
