"""Integers of several words, added, subtracted and multiplied word by word, against Python's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sm100.emulator.errors import UnsupportedError
from tests.sm100.support.snippets import LANES, evaluate, launch

RANDOM = np.random.default_rng(7)
WORD = 1 << 32


def words(seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, WORD, LANES, dtype=np.uint64).astype(np.uint32)
    values[:4] = [0, WORD - 1, 1, WORD - 1]
    return values


def value(low: np.ndarray, high: np.ndarray) -> list[int]:
    return [int(a) | int(b) << 32 for a, b in zip(low, high, strict=True)]


@pytest.mark.parametrize(("low", "high"), [("add.cc.u32", "addc.u32"), ("sub.cc.s32", "subc.s32")])
def test_sums_and_differences_of_two_words(low: str, high: str) -> None:
    sources = [words(seed) for seed in range(4)]
    code = f"{low} %r20, {{0}}, {{2}}; {high} %r21, {{1}}, {{3}}; mov.b64 {{out}}, {{{{%r20, %r21}}}};"
    sign = 1 if low.startswith("add") else -1
    a, b = value(*sources[:2]), value(*sources[2:])
    found = evaluate(code, sources, "u8").tolist()
    assert found == [(x + sign * y) % WORD**2 for x, y in zip(a, b, strict=True)]
    assert any(x + sign * y not in range(WORD**2) for x, y in zip(a, b, strict=True))


def test_a_carry_goes_through_a_word() -> None:
    sources = [words(seed) for seed in range(3)]
    code = "add.cc.u32 %r20, {0}, {1}; addc.cc.u32 %r20, {2}, 0xFFFFFFFF; addc.u32 {out}, 0, 0;"
    expected = [((int(a) + int(b)) // WORD + int(c) + WORD - 1) // WORD for a, b, c in zip(*sources, strict=True)]
    assert evaluate(code, sources, "u4").tolist() == expected
    assert set(expected) == {0, 1}


def test_a_word_times_two_plus_a_word() -> None:
    """The steps in which libdevice multiplies an angle with 2 / pi."""
    factor, low, high, addend = (words(seed) for seed in (3, 5, 8, 9))
    code = """mad.lo.cc.u32 %r20, {1}, {0}, {3}; madc.hi.u32 %r21, {1}, {0}, 0;
    mad.lo.cc.u32 %r21, {2}, {0}, %r21; madc.hi.u32 %r22, {2}, {0}, 0; """
    exact = [x * int(f) + int(c) for x, f, c in zip(value(low, high), factor.tolist(), addend.tolist(), strict=True)]
    for shift, register in ((0, "%r20"), (32, "%r21"), (64, "%r22")):
        found = evaluate(code + f"mov.u32 {{out}}, {register};", [factor, low, high, addend], "u4").tolist()
        assert found == [number >> shift & (WORD - 1) for number in exact]


def test_each_lane_has_its_own_and_lanes_that_do_not_execute_keep_theirs() -> None:
    lane = np.arange(LANES, dtype=np.uint32)
    code = """setp.lt.u32 %p1, {0}, 16; add.cc.u32 %r20, {0}, 0xFFFFFFFF;
    @%p1 add.cc.u32 %r20, 0, 0; addc.u32 {out}, 0, 0;"""
    assert evaluate(code, [lane], "u4").tolist() == [0] * 16 + [1] * 16


def test_signed_high_halves_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="half hi"):
        launch("mad.hi.cc.s32 %r0, %r1, %r2, %r3;\nret;", [])
