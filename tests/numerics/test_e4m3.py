"""E4M3 and UE8M0: rounding against definitions, every code."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import ue8m0
from nvfp4_sgl.formats.e4m3 import E4M3_MAX, E4M3_MIN, round_to_e4m3
from tests.numerics import oracles


def test_e4m3_values_are_those_of_the_definition() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(
        codes.view(torch.float8_e4m3fn).float().numpy(), oracles.e4m3_values(codes.numpy()), equal_nan=True
    )
    assert oracles.E4M3_GRID[-1] == E4M3_MAX == 448
    assert oracles.E4M3_GRID[1] == E4M3_MIN == Fraction(1, 512)


def test_e4m3_rounding_of_every_bf16_and_of_the_neighbours_of_every_tie() -> None:
    x = oracles.stress_fp32(oracles.E4M3_GRID)
    got = round_to_e4m3(x).view(torch.uint8)
    assert torch.equal(got, torch.from_numpy(oracles.e4m3_codes(x.numpy())))
    assert not torch.isnan(round_to_e4m3(x).float()).any()


def test_the_vectorised_oracle_agrees_with_exact_fractions() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate(
        (rng.normal(size=200) * 100, rng.normal(size=100) * 2.0**-8, [17.0, 19.0, 2.0**-10, 2.0**-9 * 1.5])
    )
    x = np.abs(x).astype(np.float32)
    assert oracles.e4m3_codes(x).tolist() == [oracles.nearest_code(Fraction(float(v)), oracles.E4M3_GRID) for v in x]
    x /= 64
    assert oracles.e2m1_codes(x).tolist() == [oracles.nearest_code(Fraction(float(v)), oracles.E2M1_GRID) for v in x]


def test_e4m3_saturates_instead_of_becoming_nan() -> None:
    x = torch.tensor([448.0, 464.0, 464.1, 480.0, 1e30, float("inf"), -float("inf"), -465.0])
    assert round_to_e4m3(x).float().tolist() == [448.0] * 6 + [-448.0] * 2
    assert torch.isnan(round_to_e4m3(torch.tensor(float("nan"))).float())


def test_ue8m0_decodes_every_byte() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    value, reciprocal = ue8m0.decode(byte), ue8m0.decode_reciprocal(byte)
    assert [Fraction(v) for v in value[:255].tolist()] == [Fraction(2) ** (e - 127) for e in range(255)]
    assert [Fraction(v) for v in reciprocal[:255].tolist()] == [Fraction(2) ** (127 - e) for e in range(255)]
    assert torch.isnan(value[255])
    assert torch.isnan(reciprocal[255])
    assert torch.equal(ue8m0.encode_ceil(value), byte)
    assert torch.equal(value[:255], byte.view(torch.float8_e8m0fnu).float()[:255])


def test_ue8m0_ceiling_of_every_bf16_and_of_the_neighbours_of_every_power_of_two() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    near = np.concatenate((powers, np.nextafter(powers, np.float32(np.inf)), np.nextafter(powers, np.float32(0))))
    near = near[np.isfinite(near)]
    x = np.concatenate((near, np.abs(oracles.all_bf16().float().numpy())))
    expected = []
    for value in x.tolist():
        byte = 0 if value == 0 else oracles.ceil_log2(Fraction(value)) + 127
        expected.append(min(max(byte, 0), 254))
    assert ue8m0.encode_ceil(torch.from_numpy(x)).tolist() == expected
    assert [Fraction(v) for v in ue8m0.power_of_two_ceil(torch.from_numpy(x)).tolist()] == [
        Fraction(2) ** (byte - 127) for byte in expected
    ]


def test_ue8m0_marks_what_has_no_power_of_two_above_it() -> None:
    assert ue8m0.encode_ceil(torch.tensor([float("inf"), float("nan"), 3.4e38])).tolist() == [255, 255, 254]


def test_ue8m0_reads_both_storage_dtypes_and_no_other() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(ue8m0.as_bytes(byte.view(torch.float8_e8m0fnu)), byte)
    assert torch.equal(ue8m0.as_bytes(byte), byte)
    with pytest.raises(OperandError, match=r"expert scale: .*float8_e8m0fnu or .*uint8, found .*float32"):
        ue8m0.as_bytes(torch.zeros(2), "expert scale")
