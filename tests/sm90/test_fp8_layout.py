"""The layout of FP8 weights for Hopper: every bit where the kernel's fragments look for it, and back again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvfp4_sgl.cutedsl_kernels.sm90.fp8_layout import pack_fp8_tiles, unpack_fp8_tiles
from nvfp4_sgl.cutedsl_kernels.sm90.fp8_twiddle import (
    BYTES_LEFT,
    BYTES_SELECTED,
    FIRST_BYTES,
    FIRST_LEFT,
    FIRST_REST,
    FP8_PAIR_MASK,
    SECOND_BYTES,
    SECOND_LEFT,
    SECOND_REST,
)
from nvfp4_sgl.errors import OperandTypeError, OperandValueError

E4M3 = torch.float8_e4m3fn


def random_weights(*shape: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite codes, and scales over the whole range; the two of each 64 of K alike."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 127, shape, dtype=np.uint8) | random.integers(0, 2, shape, dtype=np.uint8) << 7
    scales = random.integers(10, 135, (*shape[:-1], shape[-1] // 64), dtype=np.uint8).repeat(2, axis=-1)
    return torch.from_numpy(codes).view(E4M3), torch.from_numpy(scales)


@pytest.mark.parametrize("shape", [(128, 128), (1, 64), (200, 576), (3, 130, 192), (2, 2, 64, 64)])
def test_unpacking_gives_back_every_bit(shape: tuple[int, ...]) -> None:
    codes, scales = random_weights(*shape)
    packed = pack_fp8_tiles(codes, scales)
    assert packed.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), 16896)
    found_codes, found_scales = unpack_fp8_tiles(packed, shape[-2], shape[-1])
    assert torch.equal(found_codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found_scales, scales)


def test_padding_is_zeros() -> None:
    codes, scales = random_weights(65, 64)
    packed = pack_fp8_tiles(codes, scales)
    codes_of_tile, _ = unpack_fp8_tiles(packed, 128, 128)
    assert not codes_of_tile.view(torch.uint8)[65:].any() and not codes_of_tile.view(torch.uint8)[:, 64:].any()
    factors = packed[0, 0, 16384:].view(8, 2, 8, 2, 2)  # warp, half, g, row half
    assert not factors[:, 1].any() and not factors[5:].any() and factors[:4, 0].any(-1).all()


def bf16(bits: int) -> float:
    """Value of a bf16, subnormals included."""
    field, mantissa = bits >> 7 & 0xFF, bits & 0x7F
    value = 2.0 ** (field - 127) * (1 + mantissa / 128) if field else 2.0**-126 * (mantissa / 128)
    return -value if bits >> 15 else value


def e4m3(code: int) -> float:
    field, mantissa = code >> 3 & 15, code & 7
    value = 2.0 ** (field - 7) * (1 + mantissa / 8) if field else 2.0**-6 * (mantissa / 8)
    return -value if code >> 7 else value


def test_every_word_is_where_the_fragment_has_it() -> None:
    """One by one, from the definition of wgmma's A fragment; shares no code with the packing."""
    codes, scales = random_weights(128, 128)
    packed = pack_fp8_tiles(codes, scales)[0, 0].numpy()
    words = packed[:16384].view("<u4").reshape(8, 2, 2, 32, 2, 2)
    factors = packed[16384:].view("<u2").reshape(8, 2, 8, 2)
    stored = codes.view(torch.uint8).numpy()
    random = np.random.default_rng(3)
    for _ in range(600):
        warp, half, part, lane, step = (int(random.integers(n)) for n in (8, 2, 2, 32, 2))
        first, second = (int(word) for word in words[warp, half, part, lane, step])
        both = first.to_bytes(4, "little") + second.to_bytes(4, "little")
        selected = bytes(both[BYTES_SELECTED >> 4 * i & 15] for i in range(4))
        registers = (
            (first << FIRST_LEFT | first >> (32 - FIRST_LEFT)) & FP8_PAIR_MASK,
            (second << SECOND_LEFT | second >> (32 - SECOND_LEFT)) & FP8_PAIR_MASK,
            int.from_bytes(selected, "little") & FP8_PAIR_MASK,
            first & FIRST_REST | second & SECOND_REST,
        )
        for register, value in enumerate(registers):
            row = 16 * warp + lane // 4 + 8 * (register % 2)
            factor = bf16(int(factors[warp, half, lane // 4, register % 2]))
            for upper in range(2):
                k = 64 * half + 32 * part + 16 * step + 8 * (register // 2) + 2 * (lane % 4) + upper
                exponent = int(scales[row, k // 32]) - 127
                assert bf16(value >> 16 * upper & 0xFFFF) * factor == e4m3(int(stored[row, k])) * 2.0**exponent


def test_the_registers_bits_tile_two_words() -> None:
    def turned(mask: int, left: int) -> int:
        return (mask >> left | mask << (32 - left)) & 0xFFFFFFFF

    parts = [
        (turned(FP8_PAIR_MASK, FIRST_LEFT), FIRST_BYTES, FIRST_REST),
        (turned(FP8_PAIR_MASK, SECOND_LEFT), SECOND_BYTES, SECOND_REST),
    ]
    for masks in parts:
        assert sum(masks) == 0xFFFFFFFF and masks[0] | masks[1] | masks[2] == 0xFFFFFFFF
    assert turned(FP8_PAIR_MASK, BYTES_LEFT) == FIRST_BYTES | SECOND_BYTES
    assert FIRST_REST | SECOND_REST == FP8_PAIR_MASK


def test_scales_of_zeros_may_be_any() -> None:
    codes, scales = random_weights(128, 128)
    codes.view(torch.uint8)[7, 64:] &= 0x80
    scales[7, 2:] = 0
    found_codes, found_scales = unpack_fp8_tiles(pack_fp8_tiles(codes, scales), 128, 128)
    assert torch.equal(found_codes.view(torch.uint8), codes.view(torch.uint8))
    assert found_scales[7, 2:].tolist() == [10, 10]


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_codes_are_refused(byte: int) -> None:
    codes, scales = random_weights(128, 128)
    codes.view(torch.uint8)[77, 3] = byte
    with pytest.raises(OperandValueError, match="codes: expected finite E4M3 codes, found NaN"):
        pack_fp8_tiles(codes, scales)


@pytest.mark.parametrize("byte", [0, 9, 135, 254, 255])
def test_scales_beyond_the_range_are_refused(byte: int) -> None:
    codes, scales = random_weights(128, 128)
    codes.view(torch.uint8)[5, 64:] = 0
    codes.view(torch.uint8)[5, 100] = 1
    scales[5, 2:] = byte
    with pytest.raises(OperandValueError, match=r"scale: expected 2\^-117 to 2\^7"):
        pack_fp8_tiles(codes, scales)


def test_nan_scales_of_zeros_are_refused() -> None:
    codes, scales = random_weights(128, 128)
    codes.view(torch.uint8)[5] = 0
    scales[5] = 255
    with pytest.raises(OperandValueError, match="found others or NaN"):
        pack_fp8_tiles(codes, scales)


def test_wrong_operands_are_refused() -> None:
    codes, scales = random_weights(128, 128)
    with pytest.raises(OperandTypeError, match="codes: expected"):
        pack_fp8_tiles(codes.view(torch.uint8), scales)
    with pytest.raises(OperandTypeError, match="scale: expected"):
        pack_fp8_tiles(codes, scales.view(torch.int8))
    with pytest.raises(OperandValueError, match="K to be a positive multiple of 64"):
        pack_fp8_tiles(codes[:, :96], scales[:, :3])
    with pytest.raises(OperandValueError, match="scale: expected shape"):
        pack_fp8_tiles(codes, scales[:, :3])
    scales[9, 1] += 1
    with pytest.raises(OperandValueError, match="scale: expected one for each 64 of a row, found two"):
        pack_fp8_tiles(codes, scales)
