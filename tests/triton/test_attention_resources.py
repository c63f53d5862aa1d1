"""What the compiler makes of sparse attention."""

from __future__ import annotations

import pytest
import torch

from nvfp4_sgl.triton_kernels.attention import FEW_HEADS, HOPPER, Entries, sparse_attention
from nvfp4_sgl.triton_kernels.kv_entry import page_bytes
from tests.triton.support.resources import SHARED_LIMIT, resources

STACK = {90: 640, 100: 832}
"""Bytes a thread: addresses and the like, put away before the main loop and after it. The loop itself reloads a few
among 1400 instructions (Hopper: 2); accumulators stay where they are."""


def launches() -> None:
    """A split launch over packed entries as decoding does it, for many heads and for few, and one over rows of bf16."""
    q = torch.empty(4, 64, 512, dtype=torch.bfloat16)
    sink = torch.empty(64)
    slots = torch.zeros(4, 128, dtype=torch.int32)
    lengths = torch.zeros(4, dtype=torch.int32)
    window, extra = (Entries(torch.zeros(2, page_bytes(size), dtype=torch.uint8), size) for size in (256, 64))
    given = {"window_lengths": lengths, "extra_lengths": lengths, "turns": torch.empty(4, 64), "query_eps": 1e-6}
    sparse_attention(q, window, slots, sink, 1.0, extra, slots, splits=4, **given)
    sparse_attention(q[:, :8], window, slots, sink[:8], 1.0, extra, slots, splits=4, **given)
    rows = Entries(torch.zeros(2, 256 * 512, dtype=torch.bfloat16), 256)
    sparse_attention(q, rows, slots, sink, 1.0, rows, slots, splits=1)


@pytest.mark.parametrize("architecture", [90, 100])
def test_resources(architecture: int) -> None:
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert sorted(usage.kernel for usage in found) == ["_attend"] * 3
    for usage in found:
        assert usage.shared <= SHARED_LIMIT and usage.stack <= STACK[architecture], usage
        tensor_core = {90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture]
        assert (usage.count(tensor_core) > 0) == (usage.warps == HOPPER.warps), usage
        assert usage.group_waits <= usage.count("wgmma.mma_async") // 4, usage
        assert (usage.count("mma.sync") > 0) == (usage.warps == FEW_HEADS.warps), usage
