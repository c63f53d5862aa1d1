"""Codes, block scales and row scales equal the reference's bit for bit, wherever they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats.nvfp4 import quantize_rows
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.formats.scale_layout import TOKEN_TILES
from nvfp4_sgl.triton_kernels.quantize.quantize import quantize
from nvfp4_sgl.triton_kernels.quantize.scatter import quantize_scattered
from tests.triton.support.resources import resources
from tests.triton.support.rows import POISON, poisoned_rows, require_quantized, require_rows

# The interpreter computes both sides of a choice.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def adversarial_rows(k: int) -> torch.Tensor:
    """fp32 [14, k]: all binades, ties of codes and of scales, underflowing blocks, zeros, what is not finite."""
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(14, k, generator=generator)
    x[1] *= torch.exp2(torch.randint(-30, 30, (k,), generator=generator).float())
    x[2], x[3] = 0.0, -0.0
    # A row maximum of 2688 makes g exactly representable steps: blocks of maximum 6·s, elements on ties of E2M1.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[4] = ties.repeat(k // 8) * torch.tensor([1.0, -1.0]).repeat(k // 2)
    x[4, 0] = 2688.0
    x[5] = torch.nextafter(x[4], torch.tensor(torch.inf))
    x[6] = torch.nextafter(x[4], torch.tensor(-torch.inf))
    # Scales half-way between two E4M3.
    x[7] = 0.0
    x[7, ::16] = 6.0 * (1 + torch.arange(k // 16).float() / 16)
    x[7, 0] = 2688.0
    x[8] = x[8] * 2.0**-118
    x[9] = x[9] * torch.exp2(-torch.arange(k).float() / 4)  # blocks down to a scale of 0
    x[10, ::5], x[10, 1::5], x[10, 2::5] = torch.nan, torch.inf, -torch.inf
    x[11] = 3.4e38
    x[12] = torch.nan
    x[13] = torch.randint(0, 2**31 - 1, (k,), generator=generator).to(torch.int32).view(torch.float32)
    return x


def moved(x: torch.Tensor, device: str) -> torch.Tensor:
    return x.clone().to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [64, 192, 1536])
def test_adversarial_rows(k: int, dtype: torch.dtype, device: str):
    x = adversarial_rows(k).to(dtype)
    out = poisoned_rows(len(x), k, device)
    quantize(moved(x, device), out)
    require_quantized(out, x)


@pytest.mark.parametrize("rows", [1, 3, 8, 17, 130])
def test_ragged_numbers_of_rows(rows: int, device: str):
    x = adversarial_rows(64)[torch.randint(14, (rows,), generator=torch.Generator().manual_seed(rows))]
    for token_tile in (8, 128):
        out = poisoned_rows(rows, 64, device, token_tile)
        quantize(moved(x, device), out)
        require_quantized(out, x)


def with_unit_scale(x: torch.Tensor) -> torch.Tensor:
    """Rows no larger than 2688 beside four blocks that are: 2688 * fp32(1/2688) is 1, so the row scale is."""
    assert float(x.abs().max()) <= 2688
    x = F.pad(x, (0, 64))
    x[:, -64] = 2688.0
    assert bool((quantize_rows(x).global_scale == 1).all())
    return x


def every_product_on_a_tie() -> Iterator[torch.Tensor]:
    """Rows of [g = 1]: each block scale of E4M3, elements that land on, below and above every tie of E2M1."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    blocks = torch.zeros(len(scales), 16)
    for direction in (-torch.inf, 0.0, torch.inf):
        blocks[:, 0] = 6.0 * scales
        blocks[:, 1:8] = ties * scales[:, None]
        blocks[:, 8:15] = -ties * scales[:, None]
        if direction:
            blocks[:, 1:15] = torch.nextafter(blocks[:, 1:15], torch.tensor(direction))
        yield F.pad(blocks, (0, 0, 0, 2)).view(-1, 1024)


def test_block_scales_next_to_ties(device: str):
    """Where a division by 6 in place of the product, or one rounding in place of two, gives another scale."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    maxima = [6.0 * ties]
    for direction in (-torch.inf, torch.inf):
        near = maxima[0]
        for _ in range(3):
            near = torch.nextafter(near, torch.tensor(direction))
            maxima.append(near)
    maximum = F.pad(torch.cat(maxima), (0, -len(maxima) * len(ties) % 64))
    x = with_unit_scale(F.pad(maximum[:, None], (0, 15)).view(-1, 1024))
    out = poisoned_rows(len(x), 1088, device)
    quantize(moved(x, device), out)
    assert bool(((maximum / 6).to(torch.float8_e4m3fn) != (maximum * (1 / 6)).to(torch.float8_e4m3fn)).any())
    require_quantized(out, x)


def test_every_block_scale_and_every_tie(device: str):
    x = with_unit_scale(torch.cat(list(every_product_on_a_tie())))
    out = poisoned_rows(len(x), 1088, device)
    quantize(moved(x, device), out)
    expected = quantize_rows(x)
    assert expected.block_scale.view(torch.uint8).unique().numel() == 127
    require_rows(out, expected)


@pytest.mark.parametrize("token_tile", TOKEN_TILES)
def test_layout_of_every_token_tile(token_tile: int, device: str):
    edges = torch.tensor([0, 7, 8, 15, 16, 31, 32, 63, 64, 65, 97, 127, 128, 255, 256, 299])
    x = torch.randn(len(edges), 128, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    out = poisoned_rows(300, 128, device, token_tile)
    quantize_scattered(moved(x, device), edges[:, None].int().to(device), out)
    require_quantized(out, x, edges)


def test_strides_and_groups(device: str):
    generator = torch.Generator().manual_seed(8)
    wide = torch.randn(5, 3, 160, generator=generator).to(torch.bfloat16)
    x = wide[:, :, 32:]
    out = poisoned_rows(5, 128, device, token_tile=16, groups=3)
    codes = torch.full((5, 3, 80), POISON, dtype=torch.uint8, device=device)
    quantize(moved(wide, device)[:, :, 32:], replace(out, codes=codes[:, :, :64]))
    assert bool((codes[:, :, 64:] == POISON).all())
    out.codes.copy_(codes[:, :, :64])
    require_quantized(out, x)


@pytest.mark.parametrize("token_tile", [8, 128])
def test_scattered_rows(token_tile: int, device: str):
    x = adversarial_rows(192).to(torch.bfloat16)[[0, 4, 1, 13, 10]]
    destination = torch.tensor([[3, -1, 0], [17, 2, 23], [-1, -1, -1], [9, 8, -1], [-1, 1, 16]], dtype=torch.int32)
    out = poisoned_rows(24, 192, device, token_tile)
    quantize_scattered(moved(x, device), destination.to(device), out)
    written, order = destination[destination >= 0].sort()
    sources = (destination >= 0).nonzero()[:, 0][order]
    require_quantized(out, x[sources], written.long())


def test_no_rows(device: str):
    quantize(torch.zeros(0, 64, device=device), poisoned_rows(0, 64, device))
    none = torch.zeros(0, 2, dtype=torch.int32, device=device)
    quantize_scattered(torch.zeros(0, 64, device=device), none, poisoned_rows(8, 64, device))


def test_the_part_for_fewer_tokens(device: str):
    x = adversarial_rows(64)
    for groups in (None, 2):
        whole = poisoned_rows(14, 64, device, token_tile=8, groups=groups)
        for tokens in (14, 9, 8, 1, 0):
            part = whole.first(tokens)
            rows = x[:tokens] if groups is None else x[:tokens, None].expand(tokens, 2, 64).contiguous()
            quantize(moved(rows, device), part)
            if tokens:
                assert torch.equal(part.codes.cpu().view(-1, 32), quantize_rows(rows.view(-1, 64)).packed)


def test_refusals():
    x, out = torch.zeros(4, 128), poisoned_rows(4, 128, "cpu")
    for bad, rows, message in [
        (torch.zeros(4, 96), out, "K to be a positive multiple of 64"),
        (x.half(), out, "x: expected dtype"),
        (torch.zeros(128, 4).t(), out, "last dimension"),
        (torch.zeros(4), out, "x: expected shape"),
        (x, replace(out, codes=out.codes[:3]), "out.codes: expected shape"),
        (x, replace(out, codes=out.codes.int()), "out.codes: expected dtype"),
        (x, replace(out, codes=torch.zeros(4, 66, dtype=torch.uint8)[:, :64]), "strides of a multiple of 4 bytes"),
        (x, replace(out, block_scales=out.block_scales[:-1]), "bytes for token tile 128"),
        (x, replace(out, block_scales=out.block_scales.float()), "out.block_scales: expected dtype"),
        (x, replace(out, scale=out.scale[:3]), "out.scale: expected shape"),
        (x, replace(out, scale=out.scale[:1]), "out.scale: expected shape"),
        (x, poisoned_rows(4, 128, "cpu", groups=1), "out.codes: expected shape"),
        (x, poisoned_rows(4, 128, "meta"), "out.codes: expected device"),
    ]:
        with pytest.raises(OperandError, match=message):
            quantize(bad, rows)
    for destination, message in [
        (torch.zeros(3, 2, dtype=torch.int32), "destination: expected shape"),
        (torch.zeros(4, 2, dtype=torch.int64), "destination: expected dtype"),
        (torch.zeros(4, dtype=torch.int32), "destination: expected shape"),
        (torch.zeros(2, 4, dtype=torch.int32).t(), "destination: expected a contiguous"),
    ]:
        with pytest.raises(OperandError, match=message):
            quantize_scattered(x, destination, out)
    with pytest.raises(OperandError, match="out.codes: expected shape"):
        quantize_scattered(x, torch.zeros(4, 2, dtype=torch.int32), replace(out, codes=out.codes[:, :60]))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "k"), [(1, 7168), (257, 4096), (8192, 4096), (64, 16384)])
def test_real_sizes(rows: int, k: int, device: str):
    x = torch.randn(rows, k, device=device).to(torch.bfloat16)
    out = poisoned_rows(rows, k, device)
    quantize(x, out)
    require_quantized(out, x)


@pytest.mark.gpu
def test_a_captured_graph_sees_what_its_inputs_hold_by_then(device: str):
    x = torch.zeros(16, 4096, dtype=torch.bfloat16, device=device)
    destination = torch.zeros(16, 1, dtype=torch.int32, device=device)
    out = poisoned_rows(16, 4096, device, token_tile=8)
    quantize_scattered(x, destination, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize_scattered(x, destination, out)
    x.copy_(torch.randn(16, 4096))
    destination.copy_(torch.arange(15, -1, -1)[:, None])
    graph.replay()
    require_quantized(out, x.flip(0))


def launches() -> None:
    x = torch.zeros(16, 16384, dtype=torch.bfloat16)
    quantize(x, Rows.allocate(16, 16384, 128, "cpu"))
    quantize(torch.zeros(512, 7168, dtype=torch.bfloat16), Rows.allocate(512, 7168, 128, "cpu"))  # two blocks a thread
    quantize(x.view(16, 4, 4096), Rows.allocate(16, 4096, 128, "cpu", groups=4))
    quantize_scattered(x[:, :4096], torch.zeros(16, 7, dtype=torch.int32), Rows.allocate(128, 4096, 128, "cpu"))


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) == 4
    for usage in found:
        usage.require_no_spills()
        # Nothing is contracted; the encoder's own have another suffix.
        assert usage.ptx.get("fma.rn.f32", 0) == 0
        assert (usage.count("cvt.rn.satfinite.e2m1x2") > 0) == (architecture >= 100)
        usage.require_exact_arithmetic()
