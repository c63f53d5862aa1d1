"""Compile and run every kernel before the first request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.gpu.decoder import GpuDecoder
from nvfp4_sgl.gpu.step import Step
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import APART


def sizes(limit: int) -> list[int]:
    """1 to ``limit``: every power of two and its successor, the limit, and the largest multiple of 16.

    Kernels choose their variants by thresholds and ranges that end at powers of two, and Triton compiles apart what is
    1, a multiple of 16, or neither.
    """
    powers = [1 << n for n in range(limit.bit_length())]
    found = {size for power in powers for size in (power, power + 1)} | {limit // 16 * 16, limit}
    return sorted(size for size in found if 0 < size <= limit)


@torch.no_grad()
def warm_up(
    decoder: GpuDecoder,
    config: ModelConfig,
    table: Tensor,
    caches: Sequence[LayerCache],
    slots: Tensor,
    full_to_swa: Tensor,
    *,
    tokens: int,
    requests: int,
    longest: int,
) -> None:
    """Run passes of every size on request slot 0 and page 0, which SGLang keeps for padding.

    Args:
        table: bf16 [vocabulary, d], the embedding, or this rank's part of it.
        slots: int32 [request slots, columns]; row 0 is all zeros. full_to_swa: int64; 0 maps to 0.
        tokens: of the largest prefill pass. requests: of the largest decode pass.
        longest: tokens of the longest sequence that may come.
    """

    device, end = slots.device, min(longest, slots.shape[1])

    def run(added: list[int], *, decode: bool = False, end: int = end) -> None:
        """Requests of so many new tokens up to ``end``, so that windows close and entries are scored."""
        positions = torch.cat([torch.arange(end - count, end, device=device) for count in added])
        zeros = torch.zeros_like(positions)
        new_tokens = torch.tensor(added, device=device)
        lengths = torch.full_like(new_tokens, end)
        step = Step.allocate(
            config,
            decoder.scratch,
            positions,
            torch.zeros_like(new_tokens),
            slots,
            full_to_swa,
            longest=longest if decode else end,
            decode=decode,
        )
        step.prepare(decoder.frequencies, lengths, None if decode else new_tokens)
        decoder.expand(table[:1].expand(len(zeros), -1).contiguous())  # ranks of a split vocabulary begin so
        decoder(decoder.embed(zeros, table), zeros, step, caches)

    for size in sizes(min(tokens, end)):
        run([size])
    for length in sizes(end):
        run([min(length, 16)], end=length)  # the indexer's variants go by the longest sequence
    for size in sizes(requests):
        run([1] * size, decode=True)
        run([1] * size)
        whole = -(-(size + 1) // 16) * 16
        for total in (whole, whole + 1, APART, APART + 1):
            if size < total <= min(tokens, end):
                run([1] * (size - 1) + [total - size + 1])
