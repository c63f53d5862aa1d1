"""Hooks installed into the scheduler of a server with drafts, by name in :data:`.sglang.hooked.HOOKS`.

====================  ===========  ==================================================================================
hook                  installed    why
====================  ===========  ==================================================================================
draft_decode_backend  everywhere   the steps' backend is ours
draft_extend_backend  everywhere   the backend of draft extend is ours, and its passes may be captured
sample_round          everywhere   penalties, masks, seeds and rows that are not finite, row by row
round_logprobs        everywhere   a row that is not finite has no token
clear_rejected        everywhere   our compressors read no row of a rejected token
keep_round            everywhere   five launches, of which a GPU makes one
build_tree            on the CPU   SGLang's kernel builds the chain on a GPU
draft_slots           on the CPU   same, of the slots that the steps write
bonus_tokens          on the CPU   same, of the last token of a round
write_slots           on the CPU   same, of the table of slots
last_slots            on the CPU   same
select_guess          on the CPU   SGLang keeps a chain's tokens in its own buffer on a GPU
draft_worker          DSpark       the draft's attention backend is ours
block_round           DSpark       a CPU has no stream to record lengths on
guess_block           DSpark       a launch a token
draft_backends        DSpark       the target's passes write the draft's context
place_context         DSpark       same
inject_context        DSpark       same
commit_context        DSpark       same
verify_block          DSpark       penalties row by row
accept_block          DSpark       as sample_round
====================  ===========  ==================================================================================

Of the others, those of steps, trees, rejected rows and kept rounds are EAGLE's alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvfp4_sgl.serving.drafts import accept, backend, chain, dspark_accept, dspark_backend, dspark_context, relay

Hooks = dict[str, Callable[..., Any]]

HOOKS: Hooks = {
    "round_logprobs": accept.log_probabilities,
}
EAGLE_HOOKS: Hooks = {
    "draft_decode_backend": backend.create_decode_backend,
    "draft_extend_backend": backend.create_extend_backend,
    "sample_round": accept.sample_round,
    "clear_rejected": chain.keep_rows,
    "keep_round": relay.keep_round,
}
DSPARK_HOOKS: Hooks = {
    "draft_worker": dspark_backend.create_worker,
    "block_round": dspark_backend.run_round,
    "guess_block": dspark_accept.guess,
    "draft_backends": dspark_context.init_backends,
    "place_context": dspark_context.place_prefill,
    "inject_context": dspark_context.inject_prefill,
    "commit_context": dspark_context.commit,
    "verify_block": dspark_accept.verify,
    "accept_block": dspark_accept.accept,
}
CPU_HOOKS: Hooks = {
    "write_slots": chain.write_slots,
    "last_slots": chain.last_slots,
}
EAGLE_CPU_HOOKS: Hooks = {
    "build_tree": chain.build_tree,
    "draft_slots": chain.draft_slots,
    "bonus_tokens": chain.bonus_tokens,
    "select_guess": chain.select_guess,
}
"""In place of SGLang's kernels, as those before it."""


def hooks(*, on_gpu: bool, blocks: bool) -> Hooks:
    """Those of a server with drafts; ``blocks``: DSpark's."""
    found = HOOKS | (DSPARK_HOOKS if blocks else EAGLE_HOOKS)
    if on_gpu:
        return found
    return found | CPU_HOOKS | ({} if blocks else EAGLE_CPU_HOOKS)
