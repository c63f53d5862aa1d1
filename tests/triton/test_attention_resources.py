"""What the compiler makes of sparse attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, sparse_attention
from nvfp4_sgl.triton_kernels.attention.tiling import FEW_HEADS, HOPPER
from nvfp4_sgl.triton_kernels.entries.kv_entry import page_bytes
from tests.triton.support.resources import SHARED_LIMIT, resources

STACK = {90: 32, 100: 560}
"""Bytes a thread: addresses and the like, which the main loop on Hopper at most reads; accumulators stay."""

SHARED, RESERVED, REGISTERS = 228 * 1024, 1024, 65536
"""Of a multiprocessor, both architectures: bytes of shared memory, of it for each program, registers.

Registers are given in eights: a thread that uses 255 has 256."""


def launches() -> None:
    """Packed entries as in decoding, split, for many heads and for few; as in prefill; and rows of bf16."""
    sink = torch.empty(64)
    window, extra = (Entries(torch.zeros(2, page_bytes(size), dtype=torch.uint8), size) for size in (256, 64))
    for tokens, heads, splits in ((4, 64, 4), (4, 8, 4), (128, 64, 1)):
        q = torch.empty(tokens, heads, 512, dtype=torch.bfloat16)
        slots, lengths = torch.zeros(tokens, 128, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
        given: dict[str, Any] = {"window_lengths": lengths, "extra_lengths": lengths, "turns": torch.empty(tokens, 64)}
        sparse_attention(q, window, slots, sink[:heads], 1.0, extra, slots, splits=splits, query_eps=1e-6, **given)
    rows = Entries(torch.zeros(2, 256 * 512, dtype=torch.bfloat16), 256)
    sparse_attention(q, rows, slots, sink, 1.0, rows, slots, splits=1)


@pytest.mark.parametrize("architecture", [90, 100])
def test_resources(architecture: int) -> None:
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert sorted(usage.kernel for usage in found) == ["attend"] * 4
    for usage in found:
        # Programs of split keys wait for one another: those that a multiprocessor is said to hold, it must.
        resident = {tiling.warps: tiling.resident for tiling in (HOPPER, FEW_HEADS)}[usage.warps]
        assert resident * (usage.shared + RESERVED) <= SHARED and resident * usage.warps * 32 * 256 <= REGISTERS, usage
        assert usage.fused_shuffles == 0, usage
        assert usage.shared <= SHARED_LIMIT and usage.stack <= STACK[architecture], usage
        tensor_core = {90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture]
        assert (usage.count(tensor_core) > 0) == (usage.warps == HOPPER.warps), usage
        assert usage.group_waits <= usage.count("wgmma.mma_async") // 4, usage
        assert (usage.count("mma.sync") > 0) == (usage.warps == FEW_HEADS.warps), usage
