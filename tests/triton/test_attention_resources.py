"""What the compiler makes of sparse attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, sparse_attention
from nvfp4_sgl.triton_kernels.attention.tiling import HOPPER, SIXTEEN_HEADS
from nvfp4_sgl.triton_kernels.entries.kv_entry import page_bytes
from tests.triton.support.resources import SHARED_LIMIT, resources

STACK = {90: 32, 100: 480}
QUANTIZED_STACK = {90: 80, 100: 608}
"""Bytes a thread, but of programs of few heads, which have none: addresses and the like, which the main loop on Hopper
at most reads; accumulators stay. The second where the output is quantised."""

SHARED, RESERVED, REGISTERS = 228 * 1024, 1024, 65536
"""What a multiprocessor of both architectures has: bytes of shared memory, those kept for each program, registers.

Registers are given in eights: a thread that uses 255 has 256."""


def launches() -> None:
    """Packed entries to bf16 and to NVFP4: in decoding, split, of many heads and of few; in prefill. Then bf16 rows."""
    sink = torch.empty(64)
    window, extra = (Entries(torch.zeros(2, page_bytes(size), dtype=torch.uint8), size) for size in (256, 64))
    for tokens, heads, splits in ((4, 64, 4), (4, 8, 4), (128, 64, 1)):
        q = torch.empty(tokens, heads, 512, dtype=torch.bfloat16)
        slots, lengths = torch.zeros(tokens, 128, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
        given: dict[str, Any] = {
            "window_lengths": lengths,
            "extra_lengths": lengths,
            "cos_sin": torch.empty(tokens, 64),
        }
        given |= {"splits": splits, "query_eps": 1e-6}
        sparse_attention(q, window, slots, sink[:heads], 1.0, extra, slots, **given, out=torch.empty_like(q))
        out_rows = Rows.allocate(tokens, 4096, 8, "cpu", groups=heads // 8)
        sparse_attention(q, window, slots, sink[:heads], 1.0, extra, slots, **given, out_rows=out_rows)
    rows = Entries(torch.zeros(2, 256 * 512, dtype=torch.bfloat16), 256)
    sparse_attention(q, rows, slots, sink, 1.0, rows, slots, splits=1, out=torch.empty_like(q))


@pytest.mark.parametrize("architecture", [90, 100])
def test_resources(architecture: int) -> None:
    found = [usage for usage in resources(__name__) if usage.architecture == architecture]
    assert sorted(usage.kernel for usage in found) == ["attend"] * (2 * 3 + 1)
    for usage in found:
        # Programs of split keys wait for one another: those that a multiprocessor is said to hold, it must.
        resident = {tiling.warps: tiling.resident for tiling in (HOPPER, SIXTEEN_HEADS)}[usage.warps]
        assert resident * (usage.shared + RESERVED) <= SHARED and resident * usage.warps * 32 * 256 <= REGISTERS, usage
        assert usage.fused_shuffles == 0, usage
        quantizes = usage.count("cvt.rn.satfinite.e2m1x2" if architecture >= 100 else "lop3.b32") > 0
        stack = 0 if usage.warps == SIXTEEN_HEADS.warps else (QUANTIZED_STACK if quantizes else STACK)[architecture]
        assert usage.shared <= SHARED_LIMIT and usage.stack <= stack, usage
        tensor_core = {90: "wgmma.mma_async", 100: "tcgen05.mma"}[architecture]
        assert (usage.count(tensor_core) > 0) == (usage.warps == HOPPER.warps), usage
        assert usage.group_waits <= usage.count("wgmma.mma_async") // 4, usage
        assert (usage.count("mma.sync") > 0) == (usage.warps == SIXTEEN_HEADS.warps), usage
