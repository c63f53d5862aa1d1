"""The 128x4 scale layout against its explicit offset formula, both ways."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.formats.scale_layout import scale_bytes, scale_offset, scale_rows, swizzle_128x4, unswizzle_128x4

SHAPES = [(1, 1), (128, 4), (129, 4), (128, 5), (31, 3), (33, 7), (300, 13), (256, 16), (512, 2)]


def offset(r: int, c: int, padded_columns: int) -> int:
    return ((r // 128) * (padded_columns // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


@pytest.mark.parametrize(("m", "kb"), SHAPES)
def test_every_byte_is_where_the_formula_puts_it_and_the_rest_is_zero(m: int, kb: int) -> None:
    scales = torch.randint(1, 256, (m, kb), dtype=torch.uint8, generator=torch.Generator().manual_seed(m + kb))
    rows, columns = -(-m // 128) * 128, -(-kb // 4) * 4
    assert (rows, rows * columns) == (scale_rows(m), scale_bytes(m, 16 * kb))
    expected = [0] * (rows * columns)
    for r in range(m):
        for c in range(kb):
            expected[offset(r, c, columns)] = int(scales[r, c])
    flat = swizzle_128x4(scales)
    assert flat.is_contiguous()
    assert flat.tolist() == expected


@pytest.mark.parametrize("token_tile", [8, 32, 128, 256])
@pytest.mark.parametrize(("rows", "kb"), [(1, 4), (37, 12), (130, 6)])
def test_narrow_token_tiles_have_atoms_of_their_own(rows: int, kb: int, token_tile: int) -> None:
    plain = torch.randint(1, 127, (rows, kb), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flat = swizzle_128x4(plain, token_tile)
    assert flat.numel() == scale_bytes(rows, 16 * kb, token_tile) == scale_rows(rows, token_tile) * -(-kb // 4) * 4
    places = {scale_offset(r, b, 16 * kb, token_tile): int(plain[r, b]) for r in range(rows) for b in range(kb)}
    assert len(places) == plain.numel()
    assert [places.get(place, 0) for place in range(flat.numel())] == flat.tolist()
    tile = min(token_tile, 128)
    assert scale_offset(37, 5, 16 * kb, token_tile) == offset(37 // tile * 128 + 37 % tile, 5, -(-kb // 4) * 4)
    assert torch.equal(unswizzle_128x4(flat, rows, kb, token_tile), plain)


def test_groups_of_a_row_are_columns() -> None:
    """A row of two groups of 64: the second group's first block is block 4 of 8."""
    plain = torch.arange(1, 9, dtype=torch.uint8).view(1, 8)
    assert swizzle_128x4(plain, 8)[scale_offset(0, 4, 128, 8)] == 5
    assert scale_offset(0, 4, 128, 8) == 512


@pytest.mark.parametrize(("m", "kb"), SHAPES)
def test_unswizzling_restores_and_ignores_the_padding(m: int, kb: int) -> None:
    scales = torch.randint(0, 256, (2, 3, m, kb), dtype=torch.uint8, generator=torch.Generator().manual_seed(m * kb))
    flat = swizzle_128x4(scales)
    assert flat.shape == (2, 3, scale_bytes(m, 16 * kb))
    assert torch.equal(flat[1, 2], swizzle_128x4(scales[1, 2]))
    padding = swizzle_128x4(torch.ones(m, kb, dtype=torch.uint8)) == 0
    flat[..., padding] = 0xA5
    back = unswizzle_128x4(flat, m, kb)
    assert back.is_contiguous()
    assert torch.equal(back, scales)


def test_e4m3_scales_keep_their_dtype_and_their_bits() -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(64, 4)
    flat = swizzle_128x4(scales.view(torch.float8_e4m3fn))
    assert flat.dtype == torch.float8_e4m3fn
    assert torch.equal(flat.view(torch.uint8), swizzle_128x4(scales))
    back = unswizzle_128x4(flat, 64, 4)
    assert back.dtype == torch.float8_e4m3fn
    assert torch.equal(back.view(torch.uint8), scales)


def test_strided_scales_are_read_as_they_look() -> None:
    scales = torch.randint(0, 256, (9, 200), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).T
    assert torch.equal(swizzle_128x4(scales), swizzle_128x4(scales.contiguous()))


def test_wrong_input_is_named() -> None:
    with pytest.raises(TypeError, match=r"block scales: .* found torch\.float32"):
        swizzle_128x4(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"block scales: expected shape \[\.\.\., M, Kb\]"):
        swizzle_128x4(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="M=129, Kb=4"):
        unswizzle_128x4(torch.zeros(512, dtype=torch.uint8), 129, 4)
