"""Rows alone: streams, norms, NVFP4, entries of the caches, RoPE tables."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.common.rope import rope_cos_sin
from nvfp4_sgl.triton_kernels.entries.index_entry import store_index_keys
from nvfp4_sgl.triton_kernels.entries.kv_entry import norm_rope_store_kv, store_kv_entries
from nvfp4_sgl.triton_kernels.hyper_connection import draft_inputs, streams
from nvfp4_sgl.triton_kernels.quantize.mxfp8 import quantize_mxfp8
from nvfp4_sgl.triton_kernels.quantize.quantize import quantize
from nvfp4_sgl.triton_kernels.quantize.rounded import round_to_mxfp8, round_to_nvfp4, scale_rows
from nvfp4_sgl.triton_kernels.quantize.scatter import quantize_scattered
from tests.sm100.triton.cases.case import Outputs, case, close, next_codes, seldom
from tests.triton.support.rows import poisoned_rows
from tests.triton.test_index_entry import adversarial_keys
from tests.triton.test_index_entry import pool as index_pool
from tests.triton.test_kv_entry import adversarial_rows as adversarial_entries
from tests.triton.test_kv_entry import pool as kv_pool
from tests.triton.test_quantize import adversarial_rows
from tests.triton.test_quantize_mxfp8 import adversarial_rows as mxfp8_rows
from tests.triton.test_quantize_mxfp8 import poisoned as poisoned_mxfp8

EPS = 1e-6
BF16 = seldom(0.01, 2.0**-7)
"""A unit in the last place."""


def outputs_of(rows: Rows) -> Outputs:
    return {"codes": rows.codes, "block_scales": rows.block_scales.view(torch.uint8), "scale": rows.scale}


def some_rows(rows: int, width: int) -> Tensor:
    """fp32, a few outliers in each."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    x[:, ::17] *= 300
    return x


@case("_copy_to_streams")
def embedding_to_streams() -> Outputs:
    table = some_rows(7, 100).bfloat16()
    out = torch.full((4, 4, 100), torch.nan, dtype=torch.bfloat16)
    ids = torch.tensor([6, 0, 7, 3], dtype=torch.int32)  # 7 is unknown
    return {"streams": streams.embed_streams(ids, table, 4, out=out)}


@case("_add_to_streams")
def token_and_streams() -> Outputs:
    out = torch.full((3, 4, 100), torch.nan, dtype=torch.bfloat16)
    return {"streams": draft_inputs.add_to_streams(some_rows(3, 100), some_rows(12, 100), out)}


@case("_stream_mean", bounds={"means": BF16})
def mean_of_streams() -> Outputs:
    streams, means = (
        some_rows(12, 100).bfloat16().view(3, 4, 100),
        torch.full((3, 200), torch.nan, dtype=torch.bfloat16),
    )
    draft_inputs.stream_mean(streams, means[:, 100:])
    return {"means": means}


@case("_rms_norm", bounds={"normed": BF16})
def norm_of_rows() -> Outputs:
    x, weight = some_rows(7, 200).bfloat16(), some_rows(1, 200)[0].bfloat16()
    return {"normed": streams.rms_norm(x, weight, EPS, out=torch.full_like(x, torch.nan))}


@case("_rms_norm", bounds={"normed": close(2.0**-22)})
def norm_of_wide_rows() -> Outputs:
    x = some_rows(2, 7168)
    return {"normed": streams.rms_norm(x, None, EPS, out=torch.full_like(x, torch.nan))}


@case("_cos_sin_kernel", bounds={"cos_sin": close(0.0, 2.0**-23)})
def rope_tables() -> Outputs:
    positions = torch.tensor([0, 1, 127, 65535, 300001, 1048574])
    return {"cos_sin": rope_cos_sin(positions, inverse_frequencies(64, 1e4), torch.full((6, 64), torch.nan))}


@case("_quantize_kernel")
def quantised_rows() -> Outputs:
    out = poisoned_rows(14, 192, "cpu", token_tile=8)
    quantize(adversarial_rows(192), out)
    return outputs_of(out)


@case("_quantize_kernel")
def quantised_groups() -> Outputs:
    x = adversarial_rows(256).bfloat16().view(14, 2, 128)
    out = poisoned_rows(14, 128, "cpu", groups=2)
    quantize(x, out)
    return outputs_of(out)


@case("_quantize_mxfp8_kernel")
def rows_quantised_to_mxfp8() -> Outputs:
    """fp32, subnormal numbers among them; a row's last atom of scales is padded."""
    out = poisoned_mxfp8(12, 416, "cpu", token_tile=8)
    quantize_mxfp8(mxfp8_rows(416), out)
    return {"codes": out.codes.view(torch.uint8), "block_scales": out.block_scales}


@case("_quantize_mxfp8_kernel")
def groups_quantised_to_mxfp8() -> Outputs:
    out = poisoned_mxfp8(10, 128, "cpu", groups=2)
    quantize_mxfp8(mxfp8_rows(256).bfloat16()[:10].view(10, 2, 128), out)
    return {"codes": out.codes.view(torch.uint8), "block_scales": out.block_scales}


@case("_round_to_nvfp4")
def groups_rounded_to_nvfp4() -> Outputs:
    x = adversarial_rows(256).bfloat16().view(14, 2, 128)
    out, scale = torch.full_like(x, torch.nan), torch.full((14, 2), torch.nan)
    return {"out": round_to_nvfp4(x, out, scale), "scale": scale}


@case("_round_to_mxfp8", bounds={"out": close(0.0, 2.0**-126)})
def rows_rounded_to_mxfp8() -> Outputs:
    """The interpreter makes zeros of results that are subnormal in bf16."""
    x = mxfp8_rows(416).bfloat16()
    return {"out": round_to_mxfp8(x, torch.full_like(x, torch.nan))}


@case("_scale_rows")
def scaled_rows() -> Outputs:
    x, scale = some_rows(5, 1100), torch.rand(5, generator=torch.Generator().manual_seed(6))
    return {"out": scale_rows(x, scale, torch.full_like(x, torch.nan, dtype=torch.bfloat16))}


@case("_quantize_scattered_kernel")
def scattered_rows_quantised() -> Outputs:
    x = adversarial_rows(192).bfloat16()[[0, 4, 1, 13, 10]]
    destination = torch.tensor([[3, -1, 0], [17, 2, 23], [-1, -1, -1], [9, 8, -1], [-1, 1, 16]], dtype=torch.int32)
    out = poisoned_rows(24, 192, "cpu", token_tile=8)
    quantize_scattered(x, destination, out)
    return outputs_of(out)


@case("_store_kernel")
def index_keys() -> Outputs:
    rows, pages = adversarial_keys(), index_pool(2, 64)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(1))[: len(rows)].int()
    slots[1], slots[2] = -1, 128
    store_index_keys(rows, slots, pages, 64)
    return {"pages": pages}


@case("_store_kernel")
def kv_entries() -> Outputs:
    rows, pages = adversarial_entries().bfloat16(), kv_pool(20, 2)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[: len(rows)]
    slots[1], slots[2] = -1, 2**40
    store_kv_entries(rows, slots, pages, 2)
    return {"pages": pages}


@case("_store_kernel", bounds={"pages": next_codes(1e-3)})
def kv_entries_normed_and_rotated() -> Outputs:
    rows, pages = some_rows(5, 512).bfloat16(), kv_pool(1, 64)
    angles = torch.outer(torch.tensor([0.0, 1.0, 77.0, 4095.0, 300001.0]), inverse_frequencies(64, 160000.0))
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(1)
    weight = torch.rand(512, generator=torch.Generator().manual_seed(2)).add(0.5).bfloat16()
    norm_rope_store_kv(rows, weight, EPS, cos_sin, torch.tensor([3, 63, -1, 0, 17]), pages, 64)
    return {"pages": pages}
