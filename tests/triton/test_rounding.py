"""Each conversion equals the reference, bit for bit, over what can go wrong in it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from nvfp4_sgl.formats import e2m1, e4m3, ue8m0
from nvfp4_sgl.formats.values import BF16_MAX, as_finite_fp32
from nvfp4_sgl.triton_kernels.common import rounding

BLOCK = 4096


@triton.jit
def convert(x_ptr, out_ptr, count, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    x = tl.load(x_ptr + index, mask=inside, other=0.0)
    if FORMAT == "finite":
        out = rounding.finite(x).to(tl.int32, bitcast=True)
    elif FORMAT == "bf16":
        out = rounding.round_to_bf16(x)
        out = tl.where(out != out, 0x7FC00000, out.to(tl.int32, bitcast=True))
    elif FORMAT == "e4m3":
        out = rounding.encode_e4m3(x)
    elif FORMAT == "e4m3 bytes":
        out = rounding.encode_e4m3_bytes(x).to(tl.int32)
    elif FORMAT == "e2m1":
        out = rounding.encode_e2m1(x)
    elif FORMAT == "e2m1 word":
        y = x * -1.0  # compiled, -x is 0 - x: no sign for 0
        out = rounding.encode_e2m1_word(x, y, y, x, x, x, y, y)
    elif FORMAT == "e4m3 value":
        out = rounding.decode_e4m3(rounding.encode_e4m3(x) & 0x7F).to(tl.int32, bitcast=True)
    elif FORMAT == "ue8m0":
        out = rounding.encode_ue8m0_ceil(x)
    else:
        byte = rounding.encode_ue8m0_ceil(x)
        out = rounding.reciprocal_ue8m0(byte).to(tl.int32, bitcast=True)
    tl.store(out_ptr + index, out, mask=inside)


def converted(x: torch.Tensor, kind: str) -> torch.Tensor:
    out = torch.full(x.shape, -1, dtype=torch.int32, device=x.device)
    convert[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), kind, BLOCK)
    return out.cpu()


def around_ties(device: str) -> torch.Tensor:
    """Every bf16 (so every tie of the narrower formats) and both its fp32 neighbours: 196,608 values."""
    bf16 = torch.arange(65536, dtype=torch.int32) << 16
    return torch.cat((bf16, bf16 + 1, bf16 - 1, bf16 + 0x8000, bf16 + 0x7FFF)).view(torch.float32).to(device)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.float().contiguous().view(torch.int32)


def reference(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "finite":
        return bits(as_finite_fp32(x))
    if kind == "bf16":
        return torch.where(x.isnan(), 0x7FC00000, bits(x.to(torch.bfloat16)))
    if kind == "e4m3":
        return e4m3.round_to_e4m3(x).view(torch.uint8).int()
    if kind == "e4m3 bytes":
        return e4m3.round_to_e4m3(torch.where(x.isnan(), 0.0, x)).view(torch.uint8).int()
    if kind == "e4m3 value":
        return bits(e4m3.round_to_e4m3(x.abs()))
    if kind == "e2m1":
        return e2m1.encode(x).int()
    if kind == "e2m1 word":
        code, negated = e2m1.encode(x).int(), e2m1.encode(-x).int()
        word = torch.stack((code, negated, negated, code, code, code, negated, negated), dim=-1)
        return (word << torch.arange(0, 32, 4)).sum(dim=-1, dtype=torch.int32)
    exponent = ue8m0.encode_ceil(x)
    return exponent.int() if kind == "ue8m0" else bits(ue8m0.decode_reciprocal(exponent))


@pytest.mark.parametrize(
    "kind", ["finite", "bf16", "e4m3", "e4m3 bytes", "e4m3 value", "e2m1", "e2m1 word", "ue8m0", "reciprocal"]
)
def test_conversion_equals_the_reference(kind: str, device: str):
    x = around_ties(device)
    if kind not in ("finite", "bf16", "e4m3 bytes"):
        x = x[~x.isnan()]
    if kind in ("ue8m0", "reciprocal"):
        limit = 2.0**127 if kind == "ue8m0" else 2.0**126
        x = x[(x >= torch.finfo(torch.float32).tiny) & (x <= limit)]
    assert x.numel() > 60_000
    assert torch.equal(converted(x, kind), reference(x.cpu(), kind))


def test_largest_bf16():
    assert rounding.BF16_MAX.value == BF16_MAX
