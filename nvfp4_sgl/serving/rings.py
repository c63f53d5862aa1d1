"""Rows of the compressors' state rings of this run."""

from __future__ import annotations

from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING, STATE_RING, Rings
from nvfp4_sgl.serving.sglang import settings


def rings() -> Rings:
    """Longer where tokens are drafted, which may be rejected."""
    return STATE_RING if settings.draft_algorithm() is None else DRAFTED_STATE_RING
