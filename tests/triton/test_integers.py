"""The host's integer arithmetic is Triton's."""

from __future__ import annotations

import triton

from nvfp4_sgl.triton_kernels.common.integers import cdiv, next_power_of_2


def test_they_are_tritons() -> None:
    values = [*range(130), 4095, 4096, 4097, 2**31 - 1]
    assert [next_power_of_2(value) for value in values] == [triton.next_power_of_2(value) for value in values]
    for divisor in (1, 2, 3, 64, 1000):
        assert [cdiv(value, divisor) for value in values] == [triton.cdiv(value, divisor) for value in values]
