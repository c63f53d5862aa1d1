"""Free memory of this machine."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(ranks: int) -> int:
    """Bytes free for a rank: of the first GPU, or without one its share of the host's memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 // ranks
