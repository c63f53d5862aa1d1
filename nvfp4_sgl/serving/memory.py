"""The forecast of a rank's memory by this server's arguments, made and judged before its weights are loaded."""

from __future__ import annotations

import torch

from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.memory.forecast import Forecast, Setting, forecast
from nvfp4_sgl.memory.pools import PACKED_SWA_RATIO
from nvfp4_sgl.serving import kv_pool, stages
from nvfp4_sgl.serving import sglang_private as private
from nvfp4_sgl.targets.choose import Choice


def forecast_here(verified: Verified, choice: Choice, context: int) -> Forecast:
    """What this rank needs and has; logged in a line. ``/server_info`` and ``nvfp4-sgl doctor`` have all of it.

    Args:
        context: tokens of the longest request.

    Raises:
        UnsupportedError: it is too little, with the arithmetic.
    """
    ranks, dtype = private.tp_size(), torch.get_default_dtype()
    asked_for = private.given_arguments(private.served_arguments())["kv_cache_dtype"]
    row_dtype = kv_pool.row_dtype(private.resolved("kv_cache_dtype"), asked_for, dtype)
    setting = Setting(
        ranks=ranks,
        requests=int(private.resolved("max_running_requests")),
        context=context,
        chunk=private.largest_prefill(),
        dtype_bytes=dtype.itemsize,
        row_bytes=None if row_dtype is None else row_dtype.itemsize,
        swa_ratio=float(private.resolved("swa_full_tokens_ratio") or PACKED_SWA_RATIO),
        fraction=float(private.resolved("mem_fraction_static")),
        most_tokens=private.resolved("max_total_tokens"),
        window_by_ratio=private.sizes_window_by_ratio(),
    )
    found = forecast(verified, choice.target, setting, free_bytes(ranks), choice.mode)
    found.check()
    stages.say("memory", found.summary())
    return found


def free_bytes(ranks: int) -> int:
    """Bytes that this rank may use: what is free on its device, or on a CPU its share of what is free on the host."""
    device = private.resolved("device")
    if device == "cpu":
        return int(private.get_available_gpu_memory(device, 0) * 2**30) // ranks
    return int(private.get_available_gpu_memory(device, torch.cuda.current_device()) * 2**30)
