"""What the compiler makes of programs for several queries on Hopper, in prompts and where requests have six each."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, sparse_attention
from nvfp4_sgl.triton_kernels.attention.tiling import FOUR_QUERIES, TWO_QUERIES
from nvfp4_sgl.triton_kernels.common import chip
from nvfp4_sgl.triton_kernels.entries.kv_entry import page_bytes
from tests.triton.support.resources import SHARED_LIMIT, resources

STACK = 176
"""Bytes a thread: addresses, and what belongs to rows, which the main loop reads some words of; accumulators
stay."""


def launches() -> None:
    """With compressed entries and without; of prompts, and of requests of six queries."""
    if not chip.is_before_blackwell():
        return
    window, extra = (Entries(torch.zeros(2, page_bytes(size), dtype=torch.uint8), size) for size in (256, 64))
    slots, lengths = torch.zeros(12, 128, dtype=torch.int32), torch.zeros(12, dtype=torch.int32)
    for tiling, each in product((TWO_QUERIES, FOUR_QUERIES), (None, 6)):
        heads = tiling.heads // tiling.queries
        q, sink = torch.empty(12, heads, 512, dtype=torch.bfloat16), torch.empty(heads)
        given: dict[str, Any] = {"window_lengths": lengths, "cos_sin": torch.empty(12, 64), "query_eps": 1e-6}
        given |= {"tiling": tiling, "out": torch.empty_like(q), "owners": lengths, "tokens_each": each}
        sparse_attention(q, window, slots, sink, 1.0, **given)
        sparse_attention(q, window, slots, sink, 1.0, extra, slots, extra_lengths=lengths, **given)


def test_resources() -> None:
    found = resources(__name__)
    assert [usage.kernel for usage in found] == ["attend_block"] * 8
    for usage in found:
        assert usage.architecture == 90 and usage.stack <= STACK and usage.fused_shuffles == 0, usage
        assert usage.shared <= SHARED_LIMIT and usage.count("wgmma.mma_async") > 0, usage
        # Without a hint of their alignment, entries of two pools are not fetched ahead.
        assert usage.count("cp.async.cg") >= 24, usage
        assert usage.group_waits <= usage.count("wgmma.mma_async") // 4, usage
