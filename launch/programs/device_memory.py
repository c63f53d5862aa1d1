"""GPU memory in use by nvidia-smi, which also sees memory outside an allocator."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Collection

SAMPLE_SECONDS = 0.5
QUERY_SECONDS = 20


def used(gpus: str = "") -> int | None:
    """MiB in use on ``gpus``, numbers between commas, or on all; ``None`` where there is no nvidia-smi."""
    found = each(gpus)
    return None if found is None else sum(found)


def each(gpus: str = "") -> list[int] | None:
    """:func:`used` of each of them."""
    try:
        return [int(line) for line in _asked(gpus, "--query-gpu=memory.used")]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def used_by(processes: Collection[int], gpus: str = "") -> int | None:
    """MiB that these processes have in use on ``gpus``; ``None`` if nvidia-smi knows none, as in most containers."""
    try:
        rows = [line.split(",") for line in _asked(gpus, "--query-compute-apps=pid,used_memory")]
        found = [int(size) for process, size in rows if int(process) in processes]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return sum(found) if found else None


def _asked(gpus: str, query: str) -> list[str]:
    chosen = ["-i", gpus] if gpus else []
    command = ["nvidia-smi", *chosen, query, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    return [line for line in done.stdout.splitlines() if line.strip()]


class DeviceMemory:
    """:func:`used` of the GPUs that ``CUDA_VISIBLE_DEVICES`` names, sampled while the block runs.

    ``now`` and ``peak`` are ``None`` where there is no nvidia-smi.
    """

    def __init__(self) -> None:
        self.now: int | None = None
        self.peak: int | None = None
        self._gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> DeviceMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(timeout=30)

    def restart(self) -> int | None:
        """Count the peak from now on; what is in use now."""
        self.peak = self.now
        return self.now

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            if (found := used(self._gpus)) is not None:
                self.now, self.peak = found, max(self.peak or 0, found)
