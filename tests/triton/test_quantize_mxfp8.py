"""MXFP8 codes and block scales equal the reference's bit for bit, where a GEMM looks for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats.mxfp8 import quantize_rows
from nvfp4_sgl.formats.rows import MxFp8Rows
from nvfp4_sgl.formats.scale_layout import TOKEN_TILES, scale_rows, unswizzle_128x4
from nvfp4_sgl.triton_kernels.quantize.mxfp8 import quantize_mxfp8
from tests.triton.support.resources import Resources, resources
from tests.triton.support.rows import POISON

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def poisoned(rows: int, k: int, device: str, token_tile: int = 128, groups: int | None = None) -> MxFp8Rows:
    out = MxFp8Rows.allocate(rows, k, token_tile, device, groups=groups)
    out.codes.view(torch.uint8).fill_(POISON)
    out.block_scales.fill_(POISON)
    return out


def require_quantized(out: MxFp8Rows, x: torch.Tensor) -> None:
    """``out``, poisoned before, is ``x`` [T, K] or [T, G, K]; padding of atoms is 0, padding of tiles is poison yet."""
    rows, k, groups = len(x), x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    expected = quantize_rows(x.cpu().reshape(-1, k))
    assert torch.equal(out.codes.cpu().view(torch.uint8).reshape(-1, k), expected.codes.view(torch.uint8))
    blocks, whole = k // 32, -(-k // 128) * 4
    flat = out.block_scales.cpu()
    plain = unswizzle_128x4(flat, rows, groups * whole, out.token_tile).view(rows, groups, whole)
    assert torch.equal(plain[..., :blocks].reshape(-1, blocks), expected.scale)
    assert not plain[..., blocks:].any()
    others = scale_rows(rows, out.token_tile) * groups * whole - plain.numel()
    assert int((flat == POISON).sum()) == others + int((plain == POISON).sum()), "scales of padding were written"


def adversarial_rows(k: int) -> torch.Tensor:
    """fp32 [12, k]: all binades, ties of codes, both sides of where a scale steps, zeros, what is not finite."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(12, k, generator=generator)
    x[1] *= torch.exp2(torch.randint(-60, 60, (k,), generator=generator).float())
    x[2], x[3] = 0.0, -0.0
    x[4] = 448.0 * torch.exp2(torch.arange(k) // 32 - 64.0)
    x[5], x[6] = (torch.nextafter(x[4], torch.tensor(to)) for to in (torch.inf, 0.0))
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x[7] = ((codes[1:] + codes[:-1]) / 2).repeat(k // 126 + 1)[:k]
    x[7, ::32] = 448.0
    x[8, ::5], x[8, 1::5], x[8, 2::5] = torch.nan, torch.inf, -torch.inf
    x[9] = 3.4e38
    x[10] *= 1e-40
    x[11] = torch.randint(0, 2**31 - 1, (k,), generator=generator).to(torch.int32).view(torch.float32)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [32, 128, 416, 1536])
def test_adversarial_rows(k: int, dtype: torch.dtype, device: str) -> None:
    x = adversarial_rows(k).to(dtype)
    if dtype is torch.bfloat16:
        x[10] = 0.0  # the interpreter reads bf16's subnormal numbers as zeros
    out = poisoned(len(x), k, device)
    quantize_mxfp8(x.to(device), out)
    require_quantized(out, x)


@pytest.mark.parametrize("token_tile", TOKEN_TILES)
def test_layout_of_every_token_tile(token_tile: int, device: str) -> None:
    x = torch.randn(131, 160, generator=torch.Generator().manual_seed(9)).bfloat16()
    out = poisoned(131, 160, device, token_tile)
    quantize_mxfp8(x.to(device), out)
    require_quantized(out, x)


def test_strides_and_groups(device: str) -> None:
    wide = torch.randn(5, 3, 192, generator=torch.Generator().manual_seed(8)).bfloat16()
    x = wide[:, :, 32:]
    out = poisoned(5, 160, device, token_tile=16, groups=3)
    codes = torch.full((5, 3, 176), POISON, dtype=torch.uint8, device=device)
    quantize_mxfp8(wide.to(device)[:, :, 32:], replace(out, codes=codes.view(torch.float8_e4m3fn)[:, :, :160]))
    assert bool((codes[:, :, 160:] == POISON).all())
    out.codes.view(torch.uint8).copy_(codes[:, :, :160])
    require_quantized(out, x)


def test_no_rows(device: str) -> None:
    quantize_mxfp8(torch.empty(0, 64, device=device), poisoned(0, 64, device))


def test_what_does_not_fit_is_refused(device: str) -> None:
    x, out = torch.zeros(3, 64, device=device), poisoned(3, 64, device)
    for bad_x, bad_out, words in (
        (x.half(), out, "x: expected"),
        (x[:, :48], out, "x: expected K"),
        (x, poisoned(4, 64, device), "out.codes"),
        (x, replace(out, token_tile=8, block_scales=out.block_scales[:-1]), "out.block_scales"),
    ):
        with pytest.raises(OperandError, match=words):
            quantize_mxfp8(bad_x, bad_out)


def launches() -> None:
    """What the tests below compile: Flash's input and its attention output."""
    for shape in ((4096,), (8, 4096)):
        groups = shape[0] if len(shape) == 2 else None
        x = torch.empty(16, *shape, dtype=torch.bfloat16)
        quantize_mxfp8(x, MxFp8Rows.allocate(16, shape[-1], 16, "cpu", groups=groups))


def test_the_compiled_kernel() -> None:
    found: list[Resources] = resources(__name__)
    assert found
    for usage in found:
        usage.require_exact_arithmetic()
        usage.require_no_spills()
        assert not usage.count("mul.ftz"), "subnormal numbers are not flushed"
        if usage.architecture == 100:
            assert usage.count("cvt.rn.satfinite.e4m3x2.f32")
