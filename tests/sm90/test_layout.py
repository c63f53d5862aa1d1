"""The weights' layout for Hopper: every bit where the kernel's fragments look for it, and back again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.sm90 import layout
from nvfp4_sgl.cutedsl_kernels.sm90.layout import pack_tiles, unpack_tiles
from nvfp4_sgl.cutedsl_kernels.sm90.twiddle import (
    FIRST,
    FIRST_REST,
    JOINED,
    PAIR_MASK,
    SECOND,
    SECOND_REST,
)
from nvfp4_sgl.errors import OperandTypeError, OperandValueError
from tests.support.numpy_nvfp4 import E4M3


def random_weights(*shape: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [*shape[:-1], K/2], signed zeros where the scale is 0, and E4M3 scales over the whole finite range."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    scales = random.integers(0, 127, (*shape[:-1], shape[-1] // 16), dtype=np.uint8)
    scales[random.random(scales.shape) < 0.02] = 0
    codes[np.repeat(scales == 0, 8, axis=-1)] &= 0x88
    return torch.from_numpy(codes), torch.from_numpy(scales).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(128, 128), (1, 64), (200, 576), (3, 130, 192), (2, 2, 64, 64)])
def test_unpacking_gives_back_every_bit(shape: tuple[int, ...]) -> None:
    codes, scales = random_weights(*shape)
    packed = pack_tiles(codes, scales)
    assert packed.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), 9216)
    found_codes, found_scales = unpack_tiles(packed, shape[-2], shape[-1])
    assert torch.equal(found_codes, codes)
    assert torch.equal(found_scales.view(torch.uint8), scales.view(torch.uint8))


def test_padding_is_zeros() -> None:
    codes, scales = random_weights(65, 64)
    codes_of_tile, scales_of_tile = unpack_tiles(pack_tiles(codes, scales), 128, 128)
    assert not codes_of_tile[65:].any() and not codes_of_tile[:, 32:].any()
    assert not scales_of_tile.view(torch.uint8)[65:].any() and not scales_of_tile.view(torch.uint8)[:, 4:].any()


def test_blocks_without_a_scale_are_signed_zeros() -> None:
    """The kernel takes the byte 0 of a scale for a power of two."""
    codes, scales = random_weights(128, 128)
    loud = codes.clone()
    zero = (scales.view(torch.uint8) == 0).repeat_interleave(8, dim=-1)
    loud[zero] |= 0x77
    assert zero.any() and torch.equal(pack_tiles(loud, scales), pack_tiles(codes, scales))


def test_every_word_is_where_the_fragment_has_it() -> None:
    """One by one, from the definition of wgmma's A fragment; shares no code with the packing."""
    codes, scales = random_weights(128, 128)
    packed = pack_tiles(codes, scales)[0, 0].numpy()
    words = packed[:8192].view("<u4").reshape(8, 2, 32, 4)
    stored_scales = packed[8192:].reshape(8, 8, 4, 2, 2)
    nibbles = np.stack([codes.numpy() & 15, codes.numpy() >> 4], axis=-1).reshape(128, 128)
    random = np.random.default_rng(3)
    for _ in range(400):
        warp, half, lane, pair = (int(random.integers(n)) for n in (8, 2, 32, 2))
        first, second = (int(words[warp, half, lane, 2 * pair + i]) for i in range(2))
        joined = (first & FIRST_REST) | (second & ~FIRST_REST)
        for word, taken in ((first, FIRST), (second, SECOND), (joined, JOINED)):
            for register, left in taken:
                value = ((word << left) | (word >> (32 - left))) & PAIR_MASK
                step, place = half * 4 + pair * 2 + register // 4, register % 4
                row = 16 * warp + lane // 4 + 8 * (place % 2)
                for upper in range(2):
                    k = 16 * step + 8 * (place // 2) + 2 * (lane % 4) + upper
                    bits = value >> (16 * upper) & 0xFFFF
                    assert (bits >> 6 & 7) | (bits >> 15 << 3) == nibbles[row, k]
        byte = int(stored_scales[warp, lane // 4, half * 2 + pair, register // 4, place % 2])
        bits = int(scales.view(torch.uint8)[row, step])
        scale = 0.0 if byte == 0 else 2.0 ** ((byte >> 3) - layout.SCALE_BIAS) * (1 + (byte & 7) / 8)
        assert scale == E4M3[bits]


def test_the_registers_bits_tile_two_words() -> None:
    def used(taken: tuple[tuple[int, int], ...]) -> int:
        mask = 0
        for _, left in taken:
            bits = ((PAIR_MASK >> left) | (PAIR_MASK << (32 - left))) & 0xFFFFFFFF
            assert not mask & bits, "two registers share a bit"
            mask |= bits
        return mask

    assert used(FIRST) == ~FIRST_REST & 0xFFFFFFFF
    assert used(SECOND) == ~SECOND_REST & 0xFFFFFFFF
    assert used(JOINED) == FIRST_REST | SECOND_REST and not FIRST_REST & SECOND_REST
    assert sorted(register for register, _ in (*FIRST, *SECOND, *JOINED)) == list(range(8))


def test_all_scales_survive() -> None:
    """The 127 finite values of E4M3 that are not negative, zero and subnormals among them, are 127 bytes."""
    scales = torch.arange(127, dtype=torch.uint8).repeat(9)[: 128 * 8].view(-1, 4)[:128]
    packed = pack_tiles(torch.zeros(128, 32, dtype=torch.uint8), scales.view(torch.float8_e4m3fn))
    _, found = unpack_tiles(packed, 128, 64)
    assert torch.equal(found.view(torch.uint8), scales)
    assert len(set(layout._encode_scales()[:127])) == 127


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0x81, 0xFE, 0xFF])
def test_scales_that_are_negative_or_nan_are_refused(byte: int) -> None:
    codes, scales = random_weights(128, 128)
    scales.view(torch.uint8)[77, 3] = byte
    with pytest.raises(OperandValueError, match="block_scales: expected finite values that are not negative"):
        pack_tiles(codes, scales)
    # Where whoever calls has them checked, they are packed as something: no index leaves a table on a GPU.
    _, found = unpack_tiles(pack_tiles(codes, scales, checked=True), 128, 128)
    assert int(found.view(torch.uint8)[77, 3]) == 0
    scales.view(torch.uint8)[77, 3] = 0
    assert torch.equal(found.view(torch.uint8), scales.view(torch.uint8))


def test_wrong_operands_are_refused() -> None:
    codes, scales = random_weights(128, 128)
    with pytest.raises(OperandTypeError, match="codes: expected"):
        pack_tiles(codes.view(torch.int8), scales)
    with pytest.raises(OperandTypeError, match="block_scales: expected"):
        pack_tiles(codes, scales.view(torch.uint8))
    with pytest.raises(OperandValueError, match="K to be a positive multiple of 64"):
        pack_tiles(codes[:, :24], scales[:, :3])
    with pytest.raises(OperandValueError, match="block_scales: expected shape"):
        pack_tiles(codes, scales[:, :4])
