"""``/update_weights_from_disk`` in the schedulers: every rank replaces its weights in place, or none does.

Until the first tensor is written everything can be refused, and nothing has changed. From then on an error ends the
process, and the server with it: a model of old and new weights must never answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.errors import CheckpointError, Nvfp4SglError
from nvfp4_sgl.model.replace import workspace_bytes
from nvfp4_sgl.process_exit import stop
from nvfp4_sgl.serving import arguments, stages
from nvfp4_sgl.serving.model import DeepseekV4ForCausalLM
from nvfp4_sgl.serving.sglang import weight_updates
from nvfp4_sgl.serving.update_request import BUSY, check_fits

logger = logging.getLogger(__name__)


def replace_weights(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Hook around the scheduler's update: check, agree with the other ranks, copy, forget the prefix cache."""
    model = updater.tp_worker.model_runner.model
    if not isinstance(model, DeepseekV4ForCausalLM):
        return original(updater, request)
    found, refusal = examine(model, updater, request.model_path)
    if refusals := [one for one in weight_updates.gather(updater, refusal) if one is not None]:
        return weight_updates.update_output(False, refusals[0])
    assert found is not None
    started = time.monotonic()
    try:
        wait_for_device(model)
        model.replace_weights(found)
        for draft in weight_updates.drafts(updater):
            draft.replace_weights(found)
        wait_for_device(model)
        if not weight_updates.finish_update(updater, request):
            raise CheckpointError("the prefix cache could not be emptied")
    except Exception as error:
        stop(half_replaced(found, error))
    stages.say("weights", f"replaced: {found.describe()}", f"{time.monotonic() - started:.1f} s")
    return weight_updates.update_output(True, f"weights replaced by those of {found.inventory.directory}")


def examine(model: Any, updater: Any, directory: str) -> tuple[Verified | None, str | None]:
    """The checkpoint in ``directory``, or why this rank refuses it.

    Headers are read again, since each rank opens the files for itself; values are checked as they are copied.
    """
    if not updater.is_fully_idle():
        return None, BUSY
    try:
        found = arguments.served(directory, None, arguments.resolved_overrides())
        check_fits(model.verified, found)
        check_memory(model)
    except (Nvfp4SglError, OSError) as error:
        return None, str(error)
    return found, None


def check_memory(model: Any) -> None:
    """CheckpointError if the device has no room to lay out the largest layer beside what is there."""
    device = model.embed.weight.device
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    need, (free, _) = workspace_bytes(model.decoder), torch.cuda.mem_get_info(device)
    if free < need:
        raise CheckpointError(
            f"no room to lay out a layer on {device}: expected {need / 1e9:.2f} GB free, found {free / 1e9:.2f} GB;"
            " start the server with a smaller --mem-fraction-static"
        )


def wait_for_device(model: Any) -> None:
    """Wait until no kernel reads or writes weights, and free the memory that laid them out."""
    if model.embed.weight.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def half_replaced(found: Verified, error: Exception) -> CheckpointError:
    """The error with which the server ends."""
    reason = str(error) if isinstance(error, Nvfp4SglError) else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"update of weights from {found.inventory.directory} failed half-way: {reason}; the server ends, since its"
        " weights are neither the old nor the new: start it again"
    )
