"""Hooks installed into the scheduler of a server with drafts, by name in :data:`.sglang.hooked.HOOKS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving.drafts import accept, backend, chain

HOOKS: dict[str, Callable[..., Any]] = {
    "draft_decode_backend": backend.create_decode_backend,
    "draft_extend_backend": backend.create_extend_backend,
    "build_tree": chain.build_tree,
    "draft_slots": chain.draft_slots,
    "bonus_tokens": chain.bonus_tokens,
    "write_slots": chain.write_slots,
    "last_slots": chain.last_slots,
    "select_guess": chain.select_guess,
    "clear_rejected": chain.keep_rows,
    "sample_round": accept.sample_round,
    "round_logprobs": accept.log_probabilities,
}
