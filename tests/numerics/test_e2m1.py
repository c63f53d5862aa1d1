"""E2M1: rounding against a definition by exhaustion, every code, every byte."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import e2m1
from nvfp4_sgl.formats.values import as_finite_fp32, require_finite
from tests.numerics import oracles


def test_values_are_those_of_a_float_with_two_exponent_bits_and_one_mantissa_bit() -> None:
    decoded = e2m1.decode(torch.arange(16, dtype=torch.uint8)).tolist()
    assert [Fraction(value) for value in decoded[:8]] == oracles.E2M1_GRID
    assert decoded[8:] == [-value for value in decoded[:8]]
    assert decoded[7] == e2m1.E2M1_MAX == 6.0


def test_every_value_encodes_to_its_own_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1.encode(e2m1.decode(codes)), codes)  # code 8 is −0: the sign of zero is kept


def test_rounding_of_every_bf16_and_of_the_neighbours_of_every_tie() -> None:
    x = oracles.stress_fp32(oracles.E2M1_GRID)
    assert torch.equal(e2m1.encode(x), torch.from_numpy(oracles.e2m1_codes(x.numpy())))


def test_rounding_of_ties_by_exact_fractions() -> None:
    ties = [(low + high) / 2 for low, high in itertools.pairwise(oracles.E2M1_GRID)]
    expected = [oracles.nearest_code(tie, oracles.E2M1_GRID) for tie in ties]
    assert expected == [0, 2, 2, 4, 4, 6, 6]
    assert e2m1.encode(torch.tensor([float(tie) for tie in ties])).tolist() == expected
    assert e2m1.encode(torch.tensor([-float(tie) for tie in ties])).tolist() == [code | 8 for code in expected]


def test_negative_values_that_round_to_zero_keep_their_sign() -> None:
    assert e2m1.encode(torch.tensor([0.0, -0.0, 0.2, -0.2, -1e-45])).tolist() == [0, 8, 0, 8, 8]


def test_packing_puts_even_positions_into_low_nibbles() -> None:
    assert e2m1.pack(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)).tolist() == [[0x21, 0x8F]]


def test_every_byte_survives_unpacking_and_packing() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    codes = e2m1.unpack(packed)
    assert codes.shape == (4, 128)
    assert torch.equal(e2m1.pack(codes), packed)
    by_hand = [nibble for byte in range(256) for nibble in (byte % 16, byte // 16)]
    assert codes.flatten().tolist() == by_hand
    direct = e2m1.decode_packed(packed)
    assert torch.equal(direct.view(torch.int32), e2m1.decode(codes).view(torch.int32))  # bits: −0 too


def test_packing_keeps_leading_dimensions_and_reads_strided_input() -> None:
    codes = torch.randint(0, 16, (3, 32, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).mT
    assert torch.equal(e2m1.unpack(e2m1.pack(codes)), codes)


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="multiple of 2, found 3"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(OperandError, match=r"uint8, found torch\.int8"):
        e2m1.unpack(torch.zeros(2, 4, dtype=torch.int8))


def test_finite_check_and_sanitising() -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), -0.0, 3.4e38, -3.4e38])
    with pytest.raises(OperandError, match="expert weight: expected finite values, found 3 NaN or infinite of 7"):
        require_finite("expert weight", x)
    largest = float(oracles.BF16_MAX)
    assert as_finite_fp32(x).tolist() == [1.0, 0.0, largest, -largest, 0.0, largest, -largest]
    assert torch.signbit(as_finite_fp32(x)).tolist() == [False, False, False, True, True, False, True]
    bf16 = oracles.all_bf16()
    assert torch.equal(as_finite_fp32(bf16).to(torch.bfloat16).view(torch.int16), bf16.view(torch.int16))
