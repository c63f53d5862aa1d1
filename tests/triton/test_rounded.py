"""Rows rounded to NVFP4 and MXFP8 in bf16, and their scales, equal the references bit for bit."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import mxfp8
from nvfp4_sgl.formats.nvfp4 import quantize_rows
from nvfp4_sgl.triton_kernels.quantize.rounded import round_to_mxfp8, round_to_nvfp4, scale_rows
from tests.triton.support.resources import resources
from tests.triton.test_quantize import adversarial_rows
from tests.triton.test_quantize_mxfp8 import adversarial_rows as adversarial_mxfp8

# The interpreter computes both sides of a choice.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def rounded(x: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` rounded to NVFP4 into poisoned outputs: values and scales."""
    out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16, device=device)
    scale = torch.full(x.shape[:-1], torch.nan, device=device)
    assert round_to_nvfp4(x.to(device), out, scale) is out
    return out.cpu(), scale.cpu()


def require_nvfp4(found: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> None:
    """Bit for bit, the sign of zero included."""
    values, scale = found
    expected = quantize_rows(x.reshape(-1, x.shape[-1]))
    exact = expected.unscaled().bfloat16()
    assert torch.equal(exact.float(), expected.unscaled()), "bf16 holds them all"
    assert torch.equal(values.view(torch.int16), exact.view(torch.int16).view(x.shape))
    assert torch.equal(scale, expected.global_scale.view(x.shape[:-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [64, 192, 1536])
def test_adversarial_rows(k: int, dtype: torch.dtype, device: str):
    x = adversarial_rows(k).to(dtype)
    require_nvfp4(rounded(x, device), x)


def test_every_product_of_a_code_and_a_block_scale(device: str):
    """A row scale of one, and a block for each scale of E4M3 that has each magnitude of E2M1."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = torch.tensor([6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0])
    blocks = torch.cat([codes, -codes]) * scales[:, None]
    x = torch.cat([torch.full((2, 16), 2688.0), blocks]).view(-1, 128)
    x = torch.nn.functional.pad(x, (0, 64))
    x[:, 128] = 2688.0
    values, scale = rounded(x, device)
    assert bool((scale == 1).all()) and torch.equal(values.float(), x)
    require_nvfp4((values, scale), x)


@pytest.mark.parametrize("rows", [1, 7, 17, 130])
def test_ragged_numbers_of_rows_with_strides_and_groups(rows: int, device: str):
    generator = torch.Generator().manual_seed(rows)
    wide = adversarial_rows(192)[torch.randint(14, (rows * 3,), generator=generator)].view(rows, 3, 192)
    x = wide[:, :, 64:]
    found = torch.full((rows, 3, 128), torch.nan, dtype=torch.bfloat16, device=device)
    scale = torch.full((rows, 3), torch.nan, device=device)
    round_to_nvfp4(wide.to(device)[:, :, 64:], found, scale)
    require_nvfp4((found.cpu(), scale.cpu()), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [32, 416, 1536])
def test_mxfp8(k: int, dtype: torch.dtype, device: str):
    x = adversarial_mxfp8(k).to(dtype)
    if dtype is torch.bfloat16:
        x[10] = 0.0  # the interpreter reads bf16's subnormal numbers as zeros
    out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16, device=device)
    assert round_to_mxfp8(x.to(device), out) is out
    expected = mxfp8.quantize_rows(x).dequantize()
    large = (expected == 0) | (expected.abs() >= 2.0**-126)
    assert torch.equal(out.cpu().float()[large], expected[large])
    assert bool(out.isfinite().all()) and float(large.float().mean()) > 0.8
    assert torch.equal(out.cpu().signbit(), expected.signbit())


def test_mxfp8_with_strides_and_groups(device: str):
    wide = torch.randn(5, 3, 192, generator=torch.Generator().manual_seed(8)).bfloat16()
    out = torch.full((5, 3, 160), torch.nan, dtype=torch.bfloat16, device=device)
    round_to_mxfp8(wide.to(device)[:, :, 32:], out)
    expected = mxfp8.quantize_rows(wide[:, :, 32:].reshape(15, 160)).dequantize()
    assert torch.equal(out.cpu().float().view(15, 160), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (5, 1100), (3, 4, 260)])
def test_scales(shape: tuple[int, ...], dtype: torch.dtype, device: str):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-30, 30, shape, generator=generator).float())
    scale = torch.rand(shape[:-1], generator=generator) + 0.5
    expected = (x * scale[..., None]).to(dtype)
    out = torch.full(shape, torch.nan, dtype=dtype, device=device)
    assert torch.equal(scale_rows(x.to(device), scale.to(device), out).cpu(), expected)
    if dtype is torch.float32:
        sums = x.to(device)
        assert torch.equal(scale_rows(sums, scale.to(device), sums).cpu(), expected)
    if shape[0] > 1:
        wrong = scale_rows(x.to(device), scale.roll(1, 0).to(device), torch.empty_like(out)).cpu()
        assert not torch.equal(wrong, expected), "the scale of another row"


def test_no_rows(device: str):
    none = torch.empty(0, 64, dtype=torch.bfloat16, device=device)
    round_to_nvfp4(none, none.clone(), torch.empty(0, device=device))
    round_to_mxfp8(none, none.clone())
    scale_rows(none.float(), torch.empty(0, device=device), none.clone())


def test_refusals():
    x, out, scale = torch.zeros(4, 128), torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(4)
    for bad, to, rows, message in [
        (torch.zeros(4, 96), out, scale, "K to be a positive multiple of 64"),
        (x.half(), out, scale, "x: expected dtype"),
        (torch.zeros(4), out, scale, "x: expected shape"),
        (torch.zeros(128, 4).t(), out, scale, "last dimension"),
        (x, out.float(), scale, "out: expected dtype"),
        (x, out[:3], scale, "out: expected shape"),
        (x, torch.zeros(4, 192, dtype=torch.bfloat16)[:, :128], scale, "out: expected a contiguous"),
        (x, out.to("meta"), scale, "out: expected device"),
        (x, out, scale[:3], "scale: expected shape"),
        (x, out, scale.double(), "scale: expected dtype"),
    ]:
        with pytest.raises(OperandError, match=message):
            round_to_nvfp4(bad, to, rows)
    with pytest.raises(OperandError, match="K to be a positive multiple of 32"):
        round_to_mxfp8(x[:, :48], out[:, :48])
    for sums, rows, to, message in [
        (x.bfloat16(), scale, out, "x: expected dtype"),
        (x[:, :64], scale, out[:, :64].contiguous(), "x: expected a contiguous"),
        (x, scale[:3], out, "scale: expected shape"),
        (x, scale, out[:, :64], "out: expected shape"),
        (x, scale, out.half(), "out: expected dtype"),
    ]:
        with pytest.raises(OperandError, match=message):
            scale_rows(sums, rows, to)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "k"), [(1, 7168), (257, 4096), (8192, 4096), (64, 16384)])
def test_real_sizes(rows: int, k: int, device: str):
    x = torch.randn(rows, k, device=device).to(torch.bfloat16)
    require_nvfp4(rounded(x, device), x.cpu())


def launches() -> None:
    x = torch.zeros(16, 16384, dtype=torch.bfloat16)
    round_to_nvfp4(x, torch.empty_like(x), torch.empty(16))
    round_to_nvfp4(x.view(16, 4, 4096), torch.empty(16, 4, 4096, dtype=torch.bfloat16), torch.empty(16, 4))
    round_to_mxfp8(x.view(16, 4, 4096), torch.empty(16, 4, 4096, dtype=torch.bfloat16))
    round_to_mxfp8(x[:, :4096], torch.empty(16, 4096, dtype=torch.bfloat16))
    scale_rows(x.float(), torch.empty(16), x)
    scale_rows(x.float(), torch.empty(16), torch.empty(16, 16384))


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) >= 5
    for usage in found:
        usage.require_no_spills()
        usage.require_exact_arithmetic()
        assert usage.ptx.get("fma.rn.f32", 0) == 0, "nothing is contracted"
        assert not usage.count("mul.ftz"), "subnormal numbers are not flushed"
