"""Context of DSpark's draft: written after the target has processed them, into the windows of its stages.

SGLang calls this the injection of context: of a prompt's chunk, and of a round's rows. Arguments are those of the
methods that these hooks stand around. They plan the rows as the target's own passes are planned, over the same slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.model.contract import PassKind, PassRequest


def place_prefill(original: Callable[..., Any], injector: Any, batch: Any) -> PassRequest:
    """The pass of a prompt's chunk."""
    added = torch.tensor(batch.extend_lens)
    starts = torch.tensor(batch.prefix_lens)
    owner = torch.repeat_interleave(torch.arange(len(added)), added)
    positions = starts[owner] + torch.arange(len(owner)) - (added.cumsum(0) - added)[owner]
    return PassRequest(
        positions.to(batch.seq_lens.device),
        batch.req_pool_indices,
        batch.seq_lens,
        PassKind.EXTEND,
        added.int().to(batch.seq_lens.device),
        longest=int((starts + added).max()),
    )


def inject_prefill(
    original: Callable[..., None], injector: Any, placement: PassRequest, *, target_hidden: Tensor, **rest: Any
) -> None:
    """Write what the stages keep of a chunk."""
    _inject(injector, target_hidden, placement)


def commit(
    original: Callable[..., None],
    executor: Any,
    *,
    batch: Any,
    verify_window: Any,
    logits_output: Any,
    **rest: Any,
) -> None:
    """Write what they keep of a round's tokens.

    Rows behind the last accepted token are written, too: the next block begins there and is as long, so that it writes
    over all of them before anything sees them. The pass then has the same size whatever is accepted.
    """
    positions = verify_window.positions_2d
    rows = positions.shape[1]
    request = PassRequest(
        positions.flatten(),
        batch.req_pool_indices,
        batch.seq_lens + rows,
        PassKind.VERIFY,
        tokens_each=rows,
    )
    _inject(executor.kv_injector, logits_output.hidden_states, request)


def _inject(injector: Any, means: Tensor, request: PassRequest) -> None:
    injector.draft_model.inject(means[: len(request.positions)], request, injector.draft_model_runner.attn_backend)
