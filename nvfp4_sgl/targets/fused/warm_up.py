"""Which passes compile every kernel that a request can ask for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from nvfp4_sgl.model.contract import PassRequest, Slots
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import APART


def sizes(limit: int) -> list[int]:
    """1 to ``limit``: every power of two and its successor, the limit, and the largest multiple of 16.

    Kernels choose their variants by thresholds and ranges that end at powers of two, and Triton compiles apart what is
    1, a multiple of 16, or neither.
    """
    powers = [1 << n for n in range(limit.bit_length())]
    found = {size for power in powers for size in (power, power + 1)} | {limit // 16 * 16, limit}
    return sorted(size for size in found if 0 < size <= limit)


def warm_up_passes(slots: Slots, tokens: int) -> Iterator[PassRequest]:
    """Passes of every size on request slot 0 and page 0, which SGLang keeps for padding.

    Args:
        slots: row 0 of the table is all zeros, and 0 maps to 0.
        tokens: of the largest prefill pass.
    """
    device, whole = slots.table.device, min(slots.longest, slots.table.shape[1])

    def request(added: list[int], *, decode: bool = False, end: int = whole) -> PassRequest:
        """Requests of so many new tokens up to ``end``, so that windows close and entries are scored."""
        positions = torch.cat([torch.arange(end - count, end, device=device) for count in added])
        new_tokens = torch.tensor(added, device=device)
        lengths = torch.full_like(new_tokens, end)
        return PassRequest(
            positions, torch.zeros_like(new_tokens), lengths, None if decode else new_tokens, longest=end
        )

    for size in sizes(min(tokens, whole)):
        yield request([size])
    for length in sizes(whole):
        yield request([min(length, 16)], end=length)  # the indexer's variants go by the longest sequence
    for size in sizes(slots.requests):
        yield request([1] * size, decode=True)
        yield request([1] * size)
        sixteens = -(-(size + 1) // 16) * 16
        for total in (sixteens, sixteens + 1, APART, APART + 1):
            if size < total <= min(tokens, whole):
                yield request([1] * (size - 1) + [total - size + 1])
