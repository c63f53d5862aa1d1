"""The table of cos and sin against the reference, up to the longest context."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.ops import rope as reference
from nvfp4_sgl.triton_kernels.common.rope import rope_cos_sin
from tests.triton.support.resources import resources

POISON = float("nan")


def frequencies(pairs: int = 32, base: float = 160000.0) -> torch.Tensor:
    return reference.inverse_frequencies(2 * pairs, base)


def cos_sin_at(positions: torch.Tensor, device: str, pairs: int = 32) -> torch.Tensor:
    out = torch.full((positions.numel(), 2 * pairs), POISON, device=device)
    return rope_cos_sin(positions.to(device), frequencies(pairs).to(device), out)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("base", [10000.0, 160000.0])
def test_cos_sin_are_those_of_fp32_angles_up_to_the_longest_context(dtype: torch.dtype, base: float, device: str):
    edges = [0, 1, 2, 127, 128, 4095, 65535, 65536, 300001, 1048574, 1048575]
    positions = torch.cat((torch.tensor(edges), torch.arange(7, 1048576, 11003))).to(dtype)
    table = frequencies(base=base)
    out = torch.full((positions.numel(), 64), POISON, device=device)
    rope_cos_sin(positions.to(device), table.to(device), out)
    angles = (positions.float()[:, None] * table).double()  # the fp32 product is the angle
    expected = torch.stack((angles.cos(), angles.sin()), -1).flatten(1)
    assert float((out.cpu().double() - expected).abs().max()) <= 2 * 2.0**-24


def test_reference_angles_are_these(device: str):
    positions = torch.tensor([0, 5, 77777, 1048575])
    x = torch.zeros(4, 1, 64)
    x[..., 0::2] = 1.0
    expected = reference.apply_rope(x, positions, frequencies())[:, 0]
    assert torch.allclose(cos_sin_at(positions, device).cpu(), expected, atol=3e-7, rtol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.zeros(3)}, "positions: expected dtype"),
        ({"frequencies": torch.ones(3), "out": torch.ones(3, 6)}, "power of two"),
        ({"out": torch.zeros(3, 7)}, "out: expected shape"),
    ],
)
def test_cos_sin_refuse(change: dict[str, torch.Tensor], message: str):
    arguments = {"positions": torch.zeros(3, dtype=torch.int64), "frequencies": torch.ones(4), "out": torch.ones(3, 8)}
    with pytest.raises(OperandError, match=message):
        rope_cos_sin(**(arguments | change))


def test_no_tokens(device: str):
    assert cos_sin_at(torch.zeros(0, dtype=torch.int64), device).shape == (0, 64)


def launches() -> None:
    rope_cos_sin(torch.zeros(16, dtype=torch.int64), torch.ones(32), torch.zeros(16, 64))


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    (usage,) = [usage for usage in resources(__name__) if usage.architecture == architecture]
    usage.require_exact_arithmetic()
    # sin and cos of large angles keep their reduction in a small array and are polynomials of fused steps.
    assert usage.local == 0 and usage.stack <= 40
