"""Hooks installed into the scheduler of a server with drafts, by name in :data:`.sglang.hooked.HOOKS`.

====================  ===========  ==================================================================================
hook                  installed    why
====================  ===========  ==================================================================================
draft_decode_backend  everywhere   the steps' backend is ours
draft_extend_backend  everywhere   the backend of draft extend is ours, and its passes may be captured
sample_round          everywhere   penalties, masks, seeds and rows that are not finite, row by row
round_logprobs        everywhere   a row that is not finite has no token
clear_rejected        everywhere   our compressors read no row of a rejected token
build_tree            on the CPU   SGLang's kernel builds the chain on a GPU
draft_slots           on the CPU   same, of the slots that the steps write
bonus_tokens          on the CPU   same, of the last token of a round
write_slots           on the CPU   same, of the table of slots
last_slots            on the CPU   same
select_guess          on the CPU   SGLang keeps a chain's tokens in its own buffer on a GPU
====================  ===========  ==================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving.drafts import accept, backend, chain

Hooks = dict[str, Callable[..., Any]]

HOOKS: Hooks = {
    "draft_decode_backend": backend.create_decode_backend,
    "draft_extend_backend": backend.create_extend_backend,
    "sample_round": accept.sample_round,
    "round_logprobs": accept.log_probabilities,
    "clear_rejected": chain.keep_rows,
}
CPU_HOOKS: Hooks = {
    "build_tree": chain.build_tree,
    "draft_slots": chain.draft_slots,
    "bonus_tokens": chain.bonus_tokens,
    "write_slots": chain.write_slots,
    "last_slots": chain.last_slots,
    "select_guess": chain.select_guess,
}
"""In place of SGLang's kernels."""


def hooks(*, on_gpu: bool) -> Hooks:
    """Those of a server with drafts."""
    return HOOKS if on_gpu else HOOKS | CPU_HOOKS
