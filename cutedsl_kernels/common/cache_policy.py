"""L2 cache policies of loads: words that ``createpolicy.fractional`` would make for a fraction of 1."""

from __future__ import annotations

EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
