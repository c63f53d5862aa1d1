"""SGLang's slot arithmetic for DeepSeek-V4 (``mem_cache/deepseek_v4_memory_pool.py`` and
``deepseek_v4_compress_state.py`` of 0.5.23).

A token owns one *full* slot. Everything else follows: its window row through the full-to-SWA mapping, the
entry that a window of ``ratio`` tokens compresses into at ``full slot // ratio``, the compressor's state row in a
ring. Pages hold 256 tokens, so windows of 4 and of 128 never straddle one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

from nvfp4_sgl.config import LayerKind

PAGE_TOKENS = 256
"""Tokens of one logical page; prefix-cache hits are multiples of it."""

Rings = Mapping[int, int]
"""Rows of the compressor state ring, by ratio."""
STATE_RING: Rings = {4: 8, 128: 128}
"""Rings of a run without drafts: they hold what open windows need."""
DRAFTED_STATE_RING: Rings = {4: 16, 128: 256}
"""Rings of a run with drafts. A pass of up to :data:`DRAFTED_TOKENS` tokens of a request overwrites nothing that the
next pass needs, even if some of its tokens are rejected."""
DRAFTED_TOKENS = 10


def entry_slot(full_slot: Tensor, ratio: int) -> Tensor:
    """Slot of the compressed entry whose window holds the token at ``full_slot``: integers of any shape."""
    return full_slot // ratio


def state_row(
    ratio: int, *, request: Tensor, position: Tensor, swa_slot: Tensor | None, rings: Rings = STATE_RING
) -> Tensor:
    """Row of a token's raw (kv, score) in the compressor's state buffer.

    Ratio 4: a ring belongs to each 256-token SWA page, so that a page reused from the prefix cache brings its last
    tokens along. Ratio 128: a ring belongs to each request; nothing is pending at a page boundary.

    Args:
        ratio: 4 or 128.
        request, position: the request's slot and the token's position, integers [T].
        swa_slot: the token's slot in the window pool, integers [T]; needed at ratio 4 alone.
        rings: rows of a ring, by ratio.

    Returns:
        Integers [T].
    """
    ring = rings[ratio]
    if LayerKind(ratio).keeps_state_by_page:
        assert swa_slot is not None
        return swa_slot // PAGE_TOKENS * ring + swa_slot % ring
    return request * ring + position % ring
