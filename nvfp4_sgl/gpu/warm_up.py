"""Compile and run every kernel before the first request."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.gpu.decoder import GpuDecoder
from nvfp4_sgl.gpu.step import Step


def sizes(limit: int) -> list[int]:
    """1 to ``limit``: every power of two and its successor, and the limit.

    Kernels choose their variants by thresholds and ranges that end at powers of two, and Triton compiles apart what is
    1, a multiple of 16, or neither.
    """
    powers = [1 << n for n in range(limit.bit_length())]
    return sorted({size for power in powers for size in (power, power + 1) if size <= limit} | {limit})


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

    def run(requests: int, each: int, *, decode: bool) -> None:
        """``requests`` requests of ``each`` tokens, far along, so that windows close and entries are scored."""
        positions = torch.arange(end - each, end, device=device).repeat(requests)
        zeros = torch.zeros_like(positions)
        lengths = torch.full((requests,), end, device=device)
        step = Step.allocate(
            config, decoder.scratch, positions, zeros[:requests], slots, full_to_swa, longest=longest, decode=decode
        )
        step.prepare(decoder.frequencies, lengths, None if decode else torch.full_like(lengths, each))
        decoder.expand(table[:1].expand(len(zeros), -1).contiguous())  # ranks of a split vocabulary begin so
        decoder(decoder.embed(zeros, table), zeros, step, caches)

    for size in sizes(min(tokens, end)):
        run(1, size, decode=False)
    for size in sizes(requests):
        run(size, 1, decode=True)
        run(size, 1, decode=False)
