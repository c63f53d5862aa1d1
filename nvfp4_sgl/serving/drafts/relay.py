"""Values that a round of EAGLE leaves for the next one under the overlap schedule, by request slot, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nvfp4_sgl.triton_kernels.plan.relay import COPIED, TOKENS, Left, keep_rows


def keep_round(original: Callable[..., None], future: Any, slots: Tensor, payload: Any) -> None:
    """Hook around SGLang's keeping of a round: five launches, or one on a GPU.

    SGLang's own allocates what it keeps by the first payload, and takes those without a guess and of other dtypes.
    """
    left = Left(payload.bonus_tokens, payload.topk_index, payload.topk_p, payload.hidden_states)
    kept = Left(future.output_tokens_buf, future.topk_index_buf, future.topk_p_buf, future.hidden_states_buf)
    more = (payload.draft_probs, payload.dsa_topk_indices, future._relay)
    if slots.is_cuda and all(each is None for each in more) and _fit(left) and _fit(kept):
        keep_rows(slots, left, kept)
    else:
        original(future, slots, payload)


def _fit(rows: Left) -> bool:
    """Whether all are there, in the dtypes that the kernel copies."""
    if any(each is None for each in rows):
        return False
    return rows.token.dtype in TOKENS and [each.dtype for each in rows[1:]] == [*COPIED]
