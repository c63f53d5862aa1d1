"""The kernel's expansion of NVFP4 and FP8 to bf16, executed: every code with every block scale, bit for bit."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.sm90.expand import VALUE_SHIFT
from nvfp4_sgl.cutedsl_kernels.sm90.fp8_layout import LARGEST_EXPONENT, LEAST_EXPONENT, pack_fp8_tiles
from nvfp4_sgl.cutedsl_kernels.sm90.layout import pack_tiles
from nvfp4_sgl.cutedsl_kernels.sm90.shape import WeightKind
from tests.sm90.support.expansion import Expansion
from tests.sm100.emulator import Compiled, compile_for, emulated
from tests.sm100.support.narrow_operands import NarrowOperand
from tests.support.numpy_nvfp4 import E2M1, E4M3


@functools.cache
def compiled(weights: WeightKind) -> Compiled:
    return compile_for("sm_90a", Expansion(weights), *Expansion.example())


def expand(weights: WeightKind, tile: torch.Tensor) -> np.ndarray:
    """fp64 [128, 128] of one tile: each lane's registers, put where wgmma takes them from."""
    packed = tile.flatten()
    registers = torch.zeros(8, 32, 8, 4, dtype=torch.int32)
    with emulated(reads=[packed], writes=[registers]) as emulator:
        emulator(compiled(weights), *Expansion.arguments(packed, registers))
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
        scales = torch.from_numpy(blocks.astype(np.uint8)).view(torch.float8_e4m3fn)
        found = expand("nvfp4", pack_tiles(torch.from_numpy(codes), scales))
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
    right = compiled("nvfp4")
    count = right.ptx.count(old)
    assert count
    monkeypatch.setitem(globals(), "compiled", lambda weights: right.patched(old, new, count))
    with pytest.raises(AssertionError):
        test_all_codes_with_all_scales()


EXPONENTS = range(LEAST_EXPONENT, LARGEST_EXPONENT + 1)


@pytest.mark.parametrize("turn", range(2))
def test_all_codes_of_fp8(turn: int) -> None:
    """254 finite codes, at each of the places of a tile, with all exponents."""
    places = np.arange(128 * 128).reshape(128, 128) * 7 + np.arange(128)[:, None] + turn * 64
    magnitudes = places % 127
    codes = (magnitudes | (places // 127 % 2) << 7).astype(np.uint8)
    exponents = np.array(EXPONENTS)[(np.arange(256).reshape(128, 2) + turn * 64) % len(EXPONENTS)]
    scales = np.repeat(exponents + 127, 2, axis=1).astype(np.uint8)
    tile = pack_fp8_tiles(torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales))
    found = expand("fp8", tile)
    exact = NarrowOperand("e4m3", codes).values() * np.repeat(2.0**exponents, 64, axis=1)
    assert np.array_equal(found, exact)
    assert np.array_equal(np.signbit(found), codes >= 0x80), "-0 stays -0"
    assert len(np.unique(codes)) == 254 and len(np.unique(exponents)) == len(EXPONENTS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mov.b32 both, {f1, f1}", "mov.b32 both, {f0, f0}"),  # the factor of row g for row g + 8
        ("0x6143", "0x4163"),  # bytes of the second word swapped
        ("0x80708070", "0x708070"),  # a sign left out
        ("shf.l.wrap.b32", "shf.r.wrap.b32"),
    ],
)
def test_a_wrong_expansion_of_fp8_is_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = compiled("fp8")
    count = right.ptx.count(old)
    assert count
    monkeypatch.setitem(globals(), "compiled", lambda weights: right.patched(old, new, count))
    with pytest.raises(AssertionError):
        test_all_codes_of_fp8(0)
