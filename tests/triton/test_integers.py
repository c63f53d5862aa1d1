"""The host's integer arithmetic: Triton's, and blocks that are as even as can be."""

from __future__ import annotations

import triton

from nvfp4_sgl.triton_kernels.common.integers import cdiv, cut, next_power_of_2


def test_they_are_tritons() -> None:
    values = [*range(130), 4095, 4096, 4097, 2**31 - 1]
    assert [next_power_of_2(value) for value in values] == [triton.next_power_of_2(value) for value in values]
    for divisor in (1, 2, 3, 64, 1000):
        assert [cdiv(value, divisor) for value in values] == [triton.cdiv(value, divisor) for value in values]


def test_blocks_are_few_and_even() -> None:
    assert (cut(6, 4), cut(5, 4), cut(4, 4), cut(3, 2), cut(1, 4)) == ((2, 3), (2, 3), (1, 4), (2, 2), (1, 1))
    for most in (1, 2, 4):
        for count in range(1, 40):
            blocks, size = cut(count, most)
            assert size <= most and (blocks - 1) * size < count <= blocks * size and (blocks - 1) * most < count
