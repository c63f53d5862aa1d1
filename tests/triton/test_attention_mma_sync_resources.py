"""What the compiler makes of the tilings for mma.sync on Hopper: no padding, loads that run ahead."""

from __future__ import annotations

from typing import Any

import torch

from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, sparse_attention
from nvfp4_sgl.triton_kernels.attention.tiling import SIXTEEN_HEADS, THIRTY_TWO_HEADS
from nvfp4_sgl.triton_kernels.common import chip
from nvfp4_sgl.triton_kernels.entries.kv_entry import page_bytes
from tests.triton.support.resources import resources

STACK = 32
"""Bytes a thread: addresses and the like; accumulators stay."""
SHARED, RESERVED, REGISTERS = 228 * 1024, 1024, 65536
"""See ``test_attention_resources``."""


def launches() -> None:
    """Packed entries, split and whole, to bf16 and to NVFP4: each with each of the other kinds once."""
    if not chip.is_before_blackwell():
        return
    window, extra = (Entries(torch.zeros(2, page_bytes(size), dtype=torch.uint8), size) for size in (256, 64))
    q, sink = torch.empty(4, 32, 512, dtype=torch.bfloat16), torch.empty(32)
    slots, lengths = torch.zeros(4, 128, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    bf16: dict[str, Any] = {"out": torch.empty_like(q)}
    nvfp4: dict[str, Any] = {"out_rows": Rows.allocate(4, 4096, 8, "cpu", groups=4)}
    for tiling, splits, outputs in (
        (THIRTY_TWO_HEADS, 4, nvfp4),
        (THIRTY_TWO_HEADS, 4, bf16),
        (THIRTY_TWO_HEADS, 1, nvfp4),
        (SIXTEEN_HEADS, 1, bf16),
    ):
        given: dict[str, Any] = {
            "window_lengths": lengths,
            "extra_lengths": lengths,
            "cos_sin": torch.empty(4, 64),
            "query_eps": 1e-6,
            "splits": splits,
            "tiling": tiling,
        }
        sparse_attention(q, window, slots, sink, 1.0, extra, slots, **given, **outputs)


def test_resources() -> None:
    found = resources(__name__)
    assert len(found) == 4
    for usage in found:
        assert usage.architecture == 90 and usage.stack <= STACK and usage.fused_shuffles == 0, usage
        assert 2 * (usage.shared + RESERVED) <= SHARED and 2 * usage.warps * 32 * 256 <= REGISTERS, usage
        assert usage.count("wgmma") == 0 and usage.count("mma.sync") in (64, 128), usage
        # Keys of both MMAs by ldmatrix, and every piece of an entry asked for ahead.
        assert usage.count("ldmatrix") >= 64 and usage.count("cp.async.cg") >= 8, usage
