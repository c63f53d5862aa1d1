"""The formats against definitions nobody here wrote: ml_dtypes and SGLang's own CPU references, where installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvfp4_sgl.formats import e2m1, fp8_block, kv_entry, mxfp4, nvfp4, scale_layout, ue8m0
from nvfp4_sgl.formats.e4m3 import round_to_e4m3
from tests.numerics import oracles


def test_element_formats_equal_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = oracles.stress_fp32(oracles.E4M3_GRID, seed=5)
    inside = x[x.abs() <= 448]
    theirs = inside.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(round_to_e4m3(inside).view(torch.uint8).numpy(), theirs)
    x = oracles.stress_fp32(oracles.E2M1_GRID, seed=6)
    inside = x[x.abs() <= 6]
    nibbles = inside.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert np.array_equal(e2m1.encode(inside).numpy(), nibbles)
    byte = torch.arange(255, dtype=torch.uint8)
    theirs = byte.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(ue8m0.decode(byte).numpy(), theirs)


def test_e2m1_codes_equal_sglangs_oracle() -> None:
    theirs = pytest.importorskip("sglang.test.kernels.deepseek_v4.dsv41_kv_quant_reference")
    x = oracles.stress_fp32(oracles.E2M1_GRID, seed=7)
    assert torch.equal(e2m1.encode(x), theirs.quantize_to_e2m1_codes(x))
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1.decode(codes), theirs.dequantize_e2m1_codes(codes))


def test_mxfp4_equals_sglangs_fake_quantiser() -> None:
    theirs = pytest.importorskip("sglang.kernels.ops.quantization.fp4_fake_quant")
    w = torch.nan_to_num(oracles.awkward_rows(96, 128, seed=8).float(), 0.0, 1.0, -1.0).clamp(-1e30, 1e30)
    assert torch.equal(mxfp4.quantize(w).dequantize(), theirs.fake_quant_fp4(w))


def test_nvfp4_bytes_are_read_the_same_by_sglangs_reference() -> None:
    theirs = pytest.importorskip("sglang.test.quant_ref_utils")
    w = torch.randn(160, 112, generator=torch.Generator().manual_seed(1))
    w[3, 5] = 100.0
    got = nvfp4.quantize_weight(w)
    swizzled = scale_layout.swizzle_128x4(got.block_scale)
    decoded = theirs.dequantize_nvfp4_to_dtype(got.packed, swizzled, 1.0, torch.float32)
    assert torch.equal(decoded, got.unscaled())


def test_scale_layout_equals_sglangs() -> None:
    theirs = pytest.importorskip("sglang.srt.layers.quantization.utils")
    scales = torch.randint(0, 127, (3, 200, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    scales = scales.view(torch.float8_e4m3fn)
    flat = theirs.swizzle_blockscale(scales).reshape(3, -1)
    assert torch.equal(scale_layout.swizzle_128x4(scales).view(torch.uint8), flat.view(torch.uint8))


def test_kv_pages_are_laid_out_and_read_the_same_by_sglangs_reference() -> None:
    layout = pytest.importorskip("sglang.kernels.ops.attention.dsv4.kv_layout").KVLayout.V4
    theirs = pytest.importorskip("sglang.test.kernels.deepseek_v4.k_cache_reference")
    generator = torch.Generator().manual_seed(3)
    for page_size in (2, 64, 256):
        assert kv_entry.page_bytes(page_size) == layout.page_bytes(page_size)
        pages = torch.full((3, kv_entry.page_bytes(page_size)), 0xA5, dtype=torch.uint8)
        slots = torch.randperm(3 * page_size, generator=generator)[:6]
        rows = oracles.awkward_rows(36, 512, seed=page_size)[: len(slots)]
        kv_entry.write_rows(pages, page_size, slots, rows)
        read = theirs.dequantize_k_cache_paged_ref(pages, slots, page_size)[:, 0]
        assert torch.equal(kv_entry.read_rows(pages, page_size, slots), read.float())


def test_fp8_weights_have_the_scale_sglang_would_round_up_to() -> None:
    theirs = pytest.importorskip("sglang.benchmark.deepseek_utils")
    w = torch.randn(300, 200, generator=torch.Generator().manual_seed(4)) * 0.02
    _, scale = theirs.per_block_cast_to_fp8(w)
    got = fp8_block.quantize_weight(w).scale.float()
    assert ((scale <= got) & (got < 2 * scale)).all()
