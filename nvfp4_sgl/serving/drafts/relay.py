"""Values that a round of EAGLE leaves for the next one under the overlap schedule, by request slot, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nvfp4_sgl.triton_kernels.plan.relay import Left, keep_rows


def keep_round(original: Callable[..., None], future: Any, slots: Tensor, payload: Any) -> None:
    """Hook around SGLang's keeping of a round of EAGLE: five launches, or one on a GPU.

    SGLang's own keeps the first round, by which it allocates, and what is more or less than a token, a guess, its
    probability and streams.

    Raises:
        OperandTypeError: a dtype is not one that the kernel copies.
    """
    left = Left(payload.bonus_tokens, payload.topk_index, payload.topk_p, payload.hidden_states)
    kept = Left(future.output_tokens_buf, future.topk_index_buf, future.topk_p_buf, future.hidden_states_buf)
    has_more = payload.draft_probs is not None or payload.dsa_topk_indices is not None
    if slots.is_cuda and not has_more and all(each is not None for each in (*left, *kept)):
        keep_rows(slots, left, kept)
    else:
        original(future, slots, payload)
