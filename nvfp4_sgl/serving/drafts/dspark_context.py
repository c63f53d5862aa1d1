"""Context of DSpark's draft: written by the target's passes, into the windows of its stages.

SGLang has its worker write the context behind a pass: of a prompt's chunk, and of the accepted rows of a round. Here
the target's own pass writes that of all its rows, by its own plan: the draft's windows lie in the same slots. A round's
pass does so in its CUDA graph, and behind it, when the scheduler's tables of slots may change already, nothing reads
them.

Rows behind the last accepted token are written, too: the next block begins there and is as long, so that it writes over
all of them before anything sees them. A pass then has the same size whatever is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving.sglang import pools


@dataclass(frozen=True)
class InTheTargetsSlots:
    """Carried by SGLang from the placement of a chunk to its injection; it asks ``positions`` for their device."""

    positions: Tensor


def init_backends(original: Callable[..., None], worker: Any) -> None:
    """Hook behind the draft's backend, before graphs are captured: from now on the target's passes write its context.

    Raises:
        UnsupportedError: the draft's windows lie in other slots than the target's.
    """
    original(worker)
    target, runner = worker.target_worker.model_runner, worker.draft_model_runner
    slots, own = (pools.full_to_swa_mapping(each.token_to_kv_pool) for each in (target, runner))
    if slots.data_ptr() != own.data_ptr():
        raise UnsupportedError(
            "draft: expected its windows in the slots of the target's pool, found slots of its own; leave flags that"
            " give it a pool of its own out"
        )
    target.model.feed(runner.model.draft, runner.attn_backend.caches)


def place_prefill(original: Callable[..., Any], injector: Any, batch: Any) -> InTheTargetsSlots:
    """Hook in place of SGLang's search for a chunk's rows."""
    return InTheTargetsSlots(batch.seq_lens)


def inject_prefill(original: Callable[..., None], injector: Any, placement: Any, **rest: Any) -> None:
    """Hook in place of SGLang's writing of a chunk's context, which is there."""


def commit(original: Callable[..., None], executor: Any, **rest: Any) -> None:
    """Hook in place of SGLang's writing of a round's context, which is there."""
