"""The forecast of a rank's memory by this server's arguments, made and judged before its weights are loaded."""

from __future__ import annotations

import torch

from nvfp4_sgl.checkpoint.drafts import DRAFTS
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.memory.forecast import Forecast, forecast
from nvfp4_sgl.memory.setting import Setting
from nvfp4_sgl.serving import kv_pool, stages
from nvfp4_sgl.serving.prompt_switch import captured_tokens
from nvfp4_sgl.serving.sglang import parallel, settings
from nvfp4_sgl.serving.sglang.ledger import find
from nvfp4_sgl.sglang_defaults import PACKED_SWA_RATIO
from nvfp4_sgl.targets.choose import Choice


def forecast_here(verified: Verified, choice: Choice, context: int, pushed_tokens: int) -> Forecast:
    """Forecast what this rank needs and has, and log it in a line; ``/server_info`` has all of it.

    Args:
        context: tokens of the longest request. pushed_tokens: as of :class:`..memory.setting.Setting`.

    Raises:
        UnsupportedError: it is too little, with the arithmetic.
    """
    ranks, dtype = parallel.tp_size(), torch.get_default_dtype()
    asked_for = settings.given_arguments(settings.served_arguments())["kv_cache_dtype"]
    row_dtype = kv_pool.row_dtype(settings.resolved("kv_cache_dtype"), asked_for, dtype)
    algorithm = settings.draft_algorithm()
    setting = Setting(
        ranks=ranks,
        requests=int(settings.resolved("max_running_requests")),
        context=context,
        chunk=settings.largest_prefill(),
        dtype_bytes=dtype.itemsize,
        row_bytes=None if row_dtype is None else row_dtype.itemsize,
        swa_ratio=float(settings.resolved("swa_full_tokens_ratio") or PACKED_SWA_RATIO),
        fraction=float(settings.resolved("mem_fraction_static")),
        most_tokens=settings.resolved("max_total_tokens"),
        window_by_ratio=settings.sizes_window_by_ratio(),
        draft=None if algorithm is None else DRAFTS[algorithm.upper()],
        round_tokens=settings.round_tokens(),
        prompt_tokens=max(captured_tokens(), default=0),
        pushed_tokens=pushed_tokens,
    )
    found = forecast(verified, choice.target, setting, free_bytes(ranks), choice.mode)
    found.check()
    stages.say("memory", found.summary())
    return found


def free_bytes(ranks: int) -> int:
    """Bytes that this rank may use: what is free on its device, or on a CPU its share of what is free on the host."""
    device = settings.resolved("device")
    if device == "cpu":
        return int(find("get_available_gpu_memory")(device, 0) * 2**30) // ranks
    return int(find("get_available_gpu_memory")(device, torch.cuda.current_device()) * 2**30)
