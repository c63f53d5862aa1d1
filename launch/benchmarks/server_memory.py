"""GPU memory of a server that is ready, beside this project's forecast of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from programs.device_memory import each

WEIGHTS = re.compile(r"Load weight end\..*?mem usage=([\d.]+) GB")
"""What SGLang says of each rank, in units of 2^30."""


def gpu_memory(info: dict[str, Any], log: Path) -> dict[str, Any]:
    """GB of a rank's weights and of all that the fullest GPU has in use, tokens of the pool, and of ours the forecast.

    Args:
        info: what ``/server_info`` answers. log: the server's.
    """
    weights = [float(size) for size in WEIGHTS.findall(log.read_text(errors="replace"))]
    used = each()
    found: dict[str, Any] = {
        "weights": round(max(weights) * 2**30 / 1e9, 2) if weights else None,
        "in use": round(max(used) * 2**20 / 1e9, 2) if used else None,
        "tokens": info.get("max_total_num_tokens") or info.get("max_total_tokens"),
    }
    states = info.get("internal_states") or [{}]
    forecast = next((state["nvfp4_sgl"].get("memory") for state in states if "nvfp4_sgl" in state), None)
    if not forecast:
        return found
    token = sum(forecast["token"].values())
    fixed = sum(forecast["weights"].values()) + sum(forecast["server"].values())
    pool = token * (found["tokens"] or forecast["tokens"] or 0)
    return found | {
        "weights, forecast": round(sum(forecast["weights"].values()) / 1e9, 2),
        "in use, forecast": round((fixed + pool + sum(forecast["estimated"].values())) / 1e9, 2),
        "tokens, forecast": forecast["tokens"],
    }
