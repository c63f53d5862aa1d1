"""Reads a server's start from its log: the stages that this package names, and the time from weights to ready."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

STAGES = ("config", "memory", "weights", "warm-up", "scheduler", "ready")
STAGE = re.compile(r"^\[(?P<at>[\d-]+ [\d:]+)[^\]]*\] nvfp4_sgl: (?P<name>[a-z-]+): (?P<words>.*)$", re.MULTILINE)
SECONDS = re.compile(r"([\d.]+) s(?: since the start of (?:this process|the server))?$")
COMPILED = re.compile(r"(compil(?:ed|ing) .*(?:processor time|processes).*)$", re.MULTILINE)


def stages(log: str) -> dict[str, float | None]:
    """Seconds of each stage that the log names, ``None`` if it says none; the last two's of processes."""
    found = {}
    for match in STAGE.finditer(log):
        if match["name"] in STAGES:
            seconds = SECONDS.search(match["words"])
            found[match["name"]] = float(seconds[1]) if seconds else None
    return found


def after_weights(log: str, ready: float) -> float | None:
    """Seconds from the line that ends the weights, which the log dates to the second, to ``ready`` (``time.time()``).

    Lines of their progress come before it, and have no seconds at their end.
    """
    for match in STAGE.finditer(log):
        if match["name"] == "weights" and SECONDS.search(match["words"]):
            return round(ready - datetime.fromisoformat(match["at"]).timestamp(), 1)
    return None


def described(log: Path, ready: float) -> dict[str, Any]:
    """``ready after weights``, the seconds of the stages, and what was compiled, of a server ready at ``ready``."""
    text = log.read_text(errors="replace") if log.exists() else ""
    compiled = COMPILED.findall(text)
    return {"ready after weights": after_weights(text, ready), "stages": stages(text), "compiled": compiled}
