"""Updates of weights in a scheduler."""

from __future__ import annotations

from typing import Any

import torch.distributed

from nvfp4_sgl.serving.sglang import parallel, settings
from nvfp4_sgl.serving.sglang.ledger import find


def gather(updater: Any, value: Any) -> list[Any]:
    """``value`` of every tensor-parallel rank, in their order; all of them call this.

    Args:
        updater: the scheduler's ``SchedulerWeightUpdaterManager``.
    """
    found: list[Any] = [value] * parallel.tp_size()
    if len(found) > 1:
        torch.distributed.all_gather_object(found, value, group=updater.tp_cpu_group)
    return found


def drafts(updater: Any) -> list[Any]:
    """The draft models that this scheduler runs beside the target; none if nothing is drafted."""
    if updater.draft_worker is None:
        return []
    return [runner.model for _, runner in updater.draft_worker.weight_update_runners()]


def finish_update(updater: Any, request: Any) -> bool:
    """Say in this scheduler which checkpoint and version it serves, and forget the prefix cache; whether it could."""
    settings.replace("update_weights", model_path=request.model_path)
    updater.record_weight_version_after_update(request.weight_version)
    return bool(updater.flush_cache(empty_cache=False))


def update_output(success: bool, message: str) -> Any:
    """A scheduler's answer to ``/update_weights_from_disk``."""
    return find("UpdateWeightFromDiskReqOutput")(success=success, message=message)
