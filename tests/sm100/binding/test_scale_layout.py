"""The layout of block scales: one definition by formula, one by arrangement, one of the numerics package."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.sm100.scale_layout import scale_bytes, scale_offset, scale_rows, swizzle_scales
from nvfp4_sgl.formats.scale_layout import swizzle_128x4


@pytest.mark.parametrize("token_tile", [8, 32, 128, 256])
@pytest.mark.parametrize(("rows", "k"), [(1, 64), (37, 192), (130, 128)])
def test_every_scale_lies_where_the_formula_says(rows: int, k: int, token_tile: int) -> None:
    plain = torch.randint(1, 127, (rows, k // 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flat = swizzle_scales(plain, token_tile)
    assert flat.numel() == scale_bytes(rows, k, token_tile) == scale_rows(rows, token_tile) * k // 16
    places = {
        scale_offset(row, block, k, token_tile): int(plain[row, block])
        for row in range(rows)
        for block in range(k // 16)
    }
    assert len(places) == plain.numel()
    assert [places.get(place, 0) for place in range(flat.numel())] == flat.tolist()


@pytest.mark.parametrize("shape", [(1, 4), (3, 200, 12), (2, 2, 128, 8), (64, 5)])
def test_weights_take_the_128x4_layout(shape: tuple[int, ...]) -> None:
    plain = torch.randint(0, 127, shape, dtype=torch.uint8)
    assert torch.equal(swizzle_scales(plain), swizzle_128x4(plain))


def test_groups_of_a_row_are_columns() -> None:
    """A row of two groups of 64: the second group's first block is block 4 of 8."""
    plain = torch.arange(1, 9, dtype=torch.uint8).view(1, 8)
    assert swizzle_scales(plain, 8)[scale_offset(0, 4, 128, 8)] == 5
    assert scale_offset(0, 4, 128, 8) == 512
