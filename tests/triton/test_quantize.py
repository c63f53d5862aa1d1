"""Codes, block scales and row scales equal the reference's bit for bit, wherever they are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from cutedsl_kernels.sm100 import scale_layout
from nvfp4_sgl.formats import e2m1, e4m3
from nvfp4_sgl.formats.nvfp4 import QuantizedRows, quantize_rows, swiglu_row_scale
from nvfp4_sgl.ops.norm import rms_norm
from nvfp4_sgl.ops.rope import apply_rope, inverse_frequencies
from nvfp4_sgl.ops.swiglu import clamped_swiglu
from nvfp4_sgl.triton_kernels.common.checks import KernelError
from nvfp4_sgl.triton_kernels.common.rope import rope_turns
from nvfp4_sgl.triton_kernels.quantize.nvfp4 import TOKEN_TILES, block_scale_bytes
from nvfp4_sgl.triton_kernels.quantize.quantize import (
    inverse_rope_quantize,
    quantize,
    quantize_scattered,
    rms_norm_quantize,
    swiglu_quantize,
)
from tests.triton.support.resources import resources

POISON = 0xA5
EPS = 1e-6
LIMIT = 10.0

# The interpreter computes both sides of a choice.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


@dataclass
class Outputs:
    """Poisoned outputs of [rows, k] or [rows, groups, k]."""

    codes: torch.Tensor
    block_scales: torch.Tensor
    row_scale: torch.Tensor
    token_tile: int

    @classmethod
    def make(cls, rows: int, k: int, device: str, token_tile: int = 128, groups: int | None = None) -> Outputs:
        leading = (rows,) if groups is None else (rows, groups)
        size = block_scale_bytes(rows, k * (groups or 1), token_tile)
        return cls(
            torch.full((*leading, k // 2), POISON, dtype=torch.uint8, device=device),
            torch.full((size,), POISON, dtype=torch.uint8, device=device),
            torch.full(leading, torch.nan, device=device),
            token_tile,
        )

    def tensors(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("codes", "block_scales", "row_scale", "token_tile")}

    def constant(self, row_scale: float) -> dict[str, Any]:
        return self.tensors() | {"row_scale": row_scale}

    def row(self, flat: torch.Tensor) -> torch.Tensor:
        """Of each row of scales, its bytes in ``flat``, where the products look for them."""
        rows, k = self.codes.shape[0], self.codes[0].numel() * 2
        offset = scale_layout.scale_offset  # integer arithmetic, for tensors of integers too
        at = offset(torch.arange(rows)[:, None], torch.arange(k // 16)[None, :], k, self.token_tile)  # type: ignore[arg-type]
        return flat.cpu()[at]

    def require(self, expected: QuantizedRows, rows: torch.Tensor | None = None, constant: bool = False) -> None:
        """The matrix is the expected one; if only ``rows`` were to be written, the others are poison yet."""
        count = self.codes.shape[0]
        rows = torch.arange(count) if rows is None else rows
        codes = torch.full((count, self.codes[0].numel()), POISON, dtype=torch.uint8)
        codes[rows] = expected.packed.view(len(rows), -1)
        assert torch.equal(self.codes.cpu().reshape(count, -1), codes)
        scales = torch.full((count, codes.shape[1] // 8), POISON, dtype=torch.uint8)
        scales[rows] = expected.block_scale.view(torch.uint8).reshape(len(rows), -1)
        assert torch.equal(self.row(self.block_scales), scales)
        untouched = int((self.block_scales == POISON).sum()) - int((scales == POISON).sum())
        assert untouched == self.block_scales.numel() - scales.numel(), "scales of padding were written"
        row_scale = torch.full((count, self.row_scale[0].numel()), torch.nan)
        if not constant:
            row_scale[rows] = expected.row_scale.view(len(rows), -1)
        assert torch.equal(self.row_scale.cpu().reshape(count, -1).nan_to_num(-1), row_scale.nan_to_num(-1))


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
    out = Outputs.make(len(x), k, device)
    quantize(moved(x, device), **out.tensors())
    out.require(quantize_rows(x))


@pytest.mark.parametrize("row_scale", [2.0**-117, swiglu_row_scale(10.0), 1.0, 2.0**116])
def test_constant_row_scale(row_scale: float, device: str):
    x = adversarial_rows(128)
    out = Outputs.make(len(x), 128, device)
    quantize(moved(x, device), **out.constant(row_scale))
    out.require(quantize_rows(x, row_scale), constant=True)


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
    x = F.pad(maximum[:, None], (0, 15)).view(-1, 1024)
    out = Outputs.make(len(x), 1024, device)
    quantize(moved(x, device), **out.constant(1.0))
    assert bool(((maximum / 6).to(torch.float8_e4m3fn) != (maximum * (1 / 6)).to(torch.float8_e4m3fn)).any())
    out.require(quantize_rows(x, 1.0), constant=True)


def test_every_block_scale_and_every_tie(device: str):
    x = torch.cat(list(every_product_on_a_tie()))
    out = Outputs.make(len(x), 1024, device)
    quantize(moved(x, device), **out.constant(1.0))
    expected = quantize_rows(x, 1.0)
    assert expected.block_scale.view(torch.uint8).unique().numel() == 127
    out.require(expected, constant=True)


@pytest.mark.parametrize("token_tile", TOKEN_TILES)
def test_layout_of_every_token_tile(token_tile: int, device: str):
    edges = torch.tensor([0, 7, 8, 15, 16, 31, 32, 63, 64, 65, 97, 127, 128, 255, 256, 299])
    x = torch.randn(len(edges), 128, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    source = torch.full((300,), -1, dtype=torch.int32)
    source[edges] = torch.arange(len(edges), dtype=torch.int32)
    out = Outputs.make(300, 128, device, token_tile)
    quantize(moved(x, device), **out.tensors(), source_row=source.to(device))
    out.require(quantize_rows(x), edges)


def test_size_of_the_scales_is_what_the_products_ask_for():
    for tile in TOKEN_TILES:
        for rows in (0, 1, 8, 127, 128, 129, 300):
            assert block_scale_bytes(rows, 192, tile) == scale_layout.scale_bytes(rows, 192, tile)


def test_strides_and_groups(device: str):
    generator = torch.Generator().manual_seed(8)
    wide = torch.randn(5, 3, 160, generator=generator).to(torch.bfloat16)
    x = wide[:, :, 32:]
    out = Outputs.make(5, 128, device, token_tile=16, groups=3)
    codes = torch.full((5, 3, 80), POISON, dtype=torch.uint8, device=device)
    quantize(moved(wide, device)[:, :, 32:], **out.tensors() | {"codes": codes[:, :, :64]})
    assert bool((codes[:, :, 64:] == POISON).all())
    out.codes.copy_(codes[:, :, :64])
    out.require(quantize_rows(x.reshape(15, 128)))


@pytest.mark.parametrize("token_tile", [8, 128])
def test_gathered_rows_and_padding(token_tile: int, device: str):
    x = adversarial_rows(64).to(torch.bfloat16)
    source = torch.full((24,), -1, dtype=torch.int32)
    written = torch.tensor([0, 1, 2, 8, 9, 17, 23])
    source[written] = torch.tensor([13, 0, 4, 4, 1, 9, 2], dtype=torch.int32)
    out = Outputs.make(24, 64, device, token_tile)
    quantize(moved(x, device), **out.tensors(), source_row=source.to(device))
    out.require(quantize_rows(x[source[written].long()]), written)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("token_tile", [8, 128])
def test_scattered_rows(token_tile: int, constant: bool, device: str):
    x = adversarial_rows(192).to(torch.bfloat16)[[0, 4, 1, 13, 10]]
    destination = torch.tensor([[3, -1, 0], [17, 2, 23], [-1, -1, -1], [9, 8, -1], [-1, 1, 16]], dtype=torch.int32)
    out = Outputs.make(24, 192, device, token_tile)
    row_scale = swiglu_row_scale(10.0)
    tensors = out.constant(row_scale) if constant else out.tensors()
    quantize_scattered(moved(x, device), destination.to(device), **tensors)
    written, order = destination[destination >= 0].sort()
    sources = (destination >= 0).nonzero()[:, 0][order]
    out.require(quantize_rows(x[sources], row_scale if constant else None), written.long(), constant)


@pytest.mark.parametrize(("rows", "k"), [(3, 64), (2, 1536), (1, 4096)])
@pytest.mark.parametrize("keep", [False, True])
def test_norm_and_quantise(rows: int, k: int, keep: bool, device: str):
    generator = torch.Generator().manual_seed(k)
    x = (torch.randn(rows, k, generator=generator) * 5).to(torch.bfloat16)
    weight = torch.randn(k, generator=generator).to(torch.bfloat16)
    out, kept = Outputs.make(rows, k, device), torch.full((rows, k), torch.nan, dtype=torch.bfloat16, device=device)
    arguments = moved(x, device), moved(weight, device), EPS
    rms_norm_quantize(*arguments, **out.tensors(), normed=kept)
    expected = rms_norm(x, weight, EPS)
    assert torch.allclose(kept.cpu().float(), expected.float(), rtol=2.0**-7, atol=0)
    assert float((kept.cpu() != expected).float().mean()) < 0.01
    if not keep:
        out = Outputs.make(rows, k, device)
        rms_norm_quantize(*arguments, **out.tensors())
    out.require(quantize_rows(kept.cpu()))


def test_norm_may_overwrite_its_input(device: str):
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    weight, out, again = torch.ones(128), Outputs.make(3, 128, device), Outputs.make(3, 128, device)
    kept, in_place = torch.empty_like(x, device=device), moved(x, device)
    rms_norm_quantize(moved(x, device), weight.to(device), EPS, **out.tensors(), normed=kept)
    rms_norm_quantize(in_place, weight.to(device), EPS, **again.tensors(), normed=in_place)
    assert torch.equal(in_place, kept) and torch.equal(again.codes, out.codes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("constant", [False, True])
def test_swiglu_and_quantise(constant: bool, dtype: torch.dtype, device: str):
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(6, 2 * 192, generator=generator) * 6
    gate_up[0, ::3], gate_up[0, 1::3] = torch.nan, torch.inf
    gate_up[1, ::2] = -torch.inf
    gate_up[2] *= 20
    gate_up = gate_up.to(dtype)
    hidden = torch.full((6, 192), 7.0, dtype=torch.bfloat16, device=device)
    out = Outputs.make(6, 192, device)
    row_scale = swiglu_row_scale(LIMIT)
    swiglu_quantize(
        moved(gate_up, device), LIMIT, **(out.constant(row_scale) if constant else out.tensors()), hidden=hidden
    )
    gate, up = gate_up.float().chunk(2, dim=-1)
    values = clamped_swiglu(gate, up, LIMIT)
    found, expected = hidden.cpu().float(), values.to(torch.bfloat16).float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.allclose(found.nan_to_num(), expected.nan_to_num(), rtol=2.0**-7, atol=1e-30)
    # exp may differ in its last bits, and with it a value next to a tie.
    wanted = quantize_rows(values, row_scale if constant else None)
    codes, wanted_codes = e2m1.unpack(out.codes.cpu()).int(), e2m1.unpack(wanted.packed).int()
    assert int(((codes & 7) - (wanted_codes & 7)).abs().max()) <= 1
    assert float((codes != wanted_codes).float().mean()) < 2e-3
    scales, wanted_scales = out.row(out.block_scales).int(), wanted.block_scale.view(torch.uint8).int()
    assert float((scales != wanted_scales).float().mean()) < 2e-2
    assert int((scales - wanted_scales).abs().max()) <= 1


def test_nothing_that_swiglu_gives_exceeds_its_constant_scale(device: str):
    gate_up = torch.full((1, 128), 1e30)
    out = Outputs.make(1, 64, device)
    swiglu_quantize(moved(gate_up, device), LIMIT, **out.constant(swiglu_row_scale(LIMIT)))
    scale = out.row(out.block_scales).view(torch.float8_e4m3fn).float()
    assert bool((scale == e4m3.E4M3_MAX).all())
    assert bool((e2m1.decode_packed(out.codes.cpu()) == e2m1.E2M1_MAX).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("groups", "heads", "width"), [(1, 3, 64), (2, 4, 128), (2, 6, 192)])
def test_inverse_rope_and_quantise(groups: int, heads: int, width: int, dtype: torch.dtype, device: str):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(3, heads, width, generator=generator).to(dtype)
    x[:, :, 0] = 8.0  # the largest of each row, so that its scale does not hang on a rotation's last bit
    x[1, 0, : width - 32] = torch.inf  # beside the rotation: clamped, not NaN
    positions, frequencies = torch.tensor([1, 70000, 1048575]), inverse_frequencies(32, 160000.0)
    turns = rope_turns(positions.to(device), frequencies.to(device), torch.empty(3, 32, device=device))
    out = Outputs.make(3, heads // groups * width, device, token_tile=8, groups=groups)
    inverse_rope_quantize(moved(x, device), turns, **out.tensors())
    rotated = apply_rope(x, positions, frequencies, inverse=True).view(3 * groups, -1)
    expected = quantize_rows(rotated)
    # The rotated may differ from the reference's by a rounding; of the others nothing may.
    found = e2m1.unpack(out.codes.cpu()).view(3, heads, width).int()
    wanted = e2m1.unpack(expected.packed).view(3, heads, width).int()
    assert torch.equal(found[:, :, : width - 32], wanted[:, :, : width - 32])
    assert float((found != wanted).float().mean()) < 2e-3
    assert torch.allclose(out.row_scale.cpu().flatten(), expected.row_scale, rtol=2.0**-7)
    scales = out.row(out.block_scales).view(3, heads, -1)
    wanted_scales = expected.block_scale.view(torch.uint8).view(3, heads, -1)
    assert float((scales != wanted_scales).float().mean()) < 2e-2


def test_no_rows(device: str):
    out = Outputs.make(0, 64, device)
    x, weight = torch.zeros(0, 64, device=device), torch.ones(64, device=device)
    quantize(x, **out.tensors())
    rms_norm_quantize(x, weight, EPS, **out.tensors())
    swiglu_quantize(torch.zeros(0, 128, device=device), LIMIT, **out.tensors())


def test_a_row_does_not_depend_on_the_batch(device: str):
    x = torch.randn(9, 4096, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16).to(device)
    weight, together, alone = (
        torch.ones(4096, device=device),
        Outputs.make(9, 4096, device),
        Outputs.make(1, 4096, device),
    )
    rms_norm_quantize(x, weight, EPS, **together.tensors())
    rms_norm_quantize(x[6:7], weight, EPS, **alone.tensors())
    assert torch.equal(together.codes[6:7], alone.codes)


def test_refusals():
    x, out = torch.zeros(4, 128), Outputs.make(4, 128, "cpu")
    good = out.tensors()
    for change, message in [
        ({"x": torch.zeros(4, 96)}, "multiple of 64"),
        ({"x": x.half()}, "x: expected dtype"),
        ({"x": torch.zeros(128, 4).t()}, "last dimension"),
        ({"x": torch.zeros(4)}, "x: expected shape"),
        ({"codes": out.codes[:3]}, "codes: expected shape"),
        ({"codes": out.codes.int()}, "codes: expected dtype"),
        ({"codes": torch.zeros(4, 66, dtype=torch.uint8)[:, :64]}, "multiples of 4 bytes"),
        ({"block_scales": out.block_scales[:-1]}, "block scales of token tile 128"),
        ({"token_tile": 48}, "token_tile: expected one of"),
        ({"row_scale": out.row_scale[:3]}, "row_scale: expected shape"),
        ({"row_scale": 1}, "a tensor or a float"),
        ({"row_scale": 0.0}, "row_scale: expected a value in"),
        ({"row_scale": float("nan")}, "row_scale: expected a value in"),
        ({"source_row": torch.zeros(4, dtype=torch.int64)}, "source_row: expected dtype"),
        ({"source_row": torch.zeros(5, dtype=torch.int32)}, "codes: expected shape"),
    ]:
        with pytest.raises(KernelError, match=message):
            quantize(**({"x": x} | good | change))
    for destination, message in [
        (torch.zeros(3, 2, dtype=torch.int32), "destination: expected shape"),
        (torch.zeros(4, 2, dtype=torch.int64), "destination: expected dtype"),
        (torch.zeros(4, dtype=torch.int32), "destination: expected shape"),
        (torch.zeros(2, 4, dtype=torch.int32).t(), "destination: expected a contiguous"),
    ]:
        with pytest.raises(KernelError, match=message):
            quantize_scattered(x, destination, **good)
    with pytest.raises(KernelError, match="codes: expected shape"):
        quantize_scattered(x, torch.zeros(4, 2, dtype=torch.int32), **good | {"codes": out.codes[:, :60]})
    with pytest.raises(KernelError, match="normed: expected dtype"):
        rms_norm_quantize(x, x[0], EPS, **good, normed=x)
    with pytest.raises(KernelError, match="limit: expected"):
        swiglu_quantize(torch.zeros(4, 256), 0.0, **good)
    with pytest.raises(KernelError, match="turns: expected rope_dim"):
        inverse_rope_quantize(
            torch.zeros(4, 2, 64), torch.zeros(4, 8), **Outputs.make(4, 128, "cpu", groups=1).tensors()
        )
    with pytest.raises(KernelError, match="x: expected H"):
        inverse_rope_quantize(
            torch.zeros(4, 3, 64), torch.zeros(4, 32), **Outputs.make(4, 64, "cpu", groups=2).tensors()
        )


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "k"), [(1, 7168), (257, 4096), (8192, 4096), (64, 16384)])
def test_real_sizes(rows: int, k: int, device: str):
    x = torch.randn(rows, k, device=device).to(torch.bfloat16)
    out = Outputs.make(rows, k, device)
    quantize(x, **out.tensors())
    out.require(quantize_rows(x.cpu()))
    kept, fused = torch.empty_like(x), Outputs.make(rows, k, device)
    rms_norm_quantize(x, torch.ones(k, device=device), EPS, **fused.tensors(), normed=kept)
    fused.require(quantize_rows(kept.cpu()))


@pytest.mark.gpu
def test_a_captured_graph_sees_what_its_inputs_hold_by_then(device: str):
    x, source = torch.zeros(16, 4096, dtype=torch.bfloat16, device=device), torch.zeros(16, dtype=torch.int32)
    source, out = source.to(device), Outputs.make(16, 4096, device, token_tile=8)
    quantize(x, **out.tensors(), source_row=source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize(x, **out.tensors(), source_row=source)
    x.copy_(torch.randn(16, 4096))
    source.copy_(torch.arange(15, -1, -1))
    graph.replay()
    out.require(quantize_rows(x.cpu().flip(0)))


def launches() -> None:
    def outputs(rows: int, k: int, groups: int | None = None) -> dict[str, Any]:
        return Outputs.make(rows, k, "cpu", groups=groups).tensors()

    x = torch.zeros(16, 16384, dtype=torch.bfloat16)
    quantize(x, **outputs(16, 16384))
    quantize(torch.zeros(512, 7168, dtype=torch.bfloat16), **outputs(512, 7168))  # more blocks a thread
    quantize(x[:, :4096], **outputs(32, 4096), source_row=torch.zeros(32, dtype=torch.int32))
    quantize_scattered(x[:, :4096], torch.zeros(16, 7, dtype=torch.int32), **outputs(128, 4096))
    rms_norm_quantize(x[:, :7168], x[0, :7168], EPS, **outputs(16, 7168), normed=x[:, :7168])
    swiglu_quantize(x[:, :6144], LIMIT, **outputs(16, 3072) | {"row_scale": swiglu_row_scale(LIMIT)})
    o = x.view(16, 32, 512)
    inverse_rope_quantize(o, torch.zeros(16, 64), **outputs(16, 4096, groups=4))


@pytest.mark.parametrize("architecture", [90, 100])
def test_kernels_fit(architecture: int):
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert len(found) == 7
    for usage in found:
        usage.require_no_spills()
        # Nothing is contracted; the encoder's own have another suffix.
        assert usage.ptx.get("fma.rn.f32", 0) == 0
        assert (usage.count("cvt.rn.satfinite.e2m1x2") > 0) == (architecture >= 100)
        if "swiglu" not in usage.kernel:  # exp
            usage.require_exact_arithmetic()
