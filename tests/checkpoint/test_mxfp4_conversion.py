"""MXFP4 read as NVFP4, for any shape, exponents and share: exact, or refused for a reason that integers give too."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_sgl.checkpoint.decoders import MxFp4AsNvFp4
from nvfp4_sgl.formats.mxfp4 import MxFp4Tensor

DECODER = MxFp4AsNvFp4()


class Pieces:
    """A matrix in memory, and a range of its blocks."""

    def __init__(self, weight: Tensor, scale: Tensor, rows: slice, blocks: slice):
        self._whole = {"weight": weight, "scale": scale}
        self._ranges = {
            "weight": (rows, slice(blocks.start * 16, blocks.stop * 16)),
            "scale": (rows, blocks),
        }

    def whole(self, part: str) -> Tensor:
        return self._whole[part]

    def piece(self, part: str) -> Tensor:
        return self._whole[part][self._ranges[part]]


def is_exact(weight: list[list[int]], scale: list[list[int]]) -> bool:
    """Whether one power of two leaves every block that is not zero a power of two from 2^-9 to 2^8, in integers."""
    exponents = [
        scale[n][b] - 127
        for n in range(len(scale))
        for b in range(len(scale[0]))
        if any(byte & 0x77 for byte in weight[n][b * 16 : b * 16 + 16])
    ]
    globals_ = range(-117, 117)
    return not exponents or any(min(exponents) >= g - 9 and max(exponents) <= g + 8 for g in globals_)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, Tensor, slice, slice]:
    n, blocks = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    low = draw(st.integers(0, 254))
    spread = draw(st.sampled_from([0, 1, 5, 16, 17, 18, 40, 254]))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (n, blocks * 16), generator=generator, dtype=torch.uint8)
    scale = torch.randint(low, min(low + spread, 254) + 1, (n, blocks), generator=generator).to(torch.uint8)
    if draw(st.booleans()):  # blocks of ±0
        zero = torch.rand(n, blocks, generator=generator) < 0.4
        weight = torch.where(zero.repeat_interleave(16, 1), weight & 0x88, weight)
        scale = torch.where(zero, torch.randint(0, 255, (n, blocks), generator=generator).to(torch.uint8), scale)
    rows = slice(draw(st.integers(0, n - 1)), n)
    columns = slice(draw(st.integers(0, blocks - 1)), blocks)
    return weight, scale, rows, columns


@settings(max_examples=400, deadline=None)
@given(matrices())
def test_exact_or_refused(matrix: tuple[Tensor, Tensor, slice, slice]) -> None:
    weight, scale, rows, blocks = matrix
    pieces = Pieces(weight.view(torch.int8), scale.view(torch.float8_e8m0fnu), rows, blocks)
    assert (DECODER.problem(pieces) is None) == is_exact(weight.tolist(), scale.tolist())
    if DECODER.problem(pieces) is not None:
        return
    found = DECODER.decode(pieces)
    expected = MxFp4Tensor(weight, scale).dequantize()[rows, blocks.start * 32 : blocks.stop * 32]
    assert torch.equal(found.dequantize().view(torch.int32), expected.view(torch.int32))
    whole = DECODER.decode(Pieces(weight, scale, slice(0, len(weight)), slice(0, scale.shape[1])))
    assert torch.equal(found.global_scale, whole.global_scale), "every rank has the same"
