"""The workspace of kernels whose pairs share tiles: global memory through which they hand on sums.

A device has one, made before the first launch that needs it, which the warm-up makes. Launches of a device use it one
after the other, so they must be of one stream, or ordered otherwise.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from .common.clusters import Clusters
from .errors import WorkspaceError
from .sm100.shape import COUNTER_WORDS, STREAM_K_TILE, KernelShape

SHAPE = KernelShape(STREAM_K_TILE, pair=True, stream_k=True)
"""All such kernels have tiles of one size."""
_made: dict[torch.device, Tensor] = {}
_lock = threading.Lock()


def workspace_bytes(clusters: Clusters) -> int:
    """Bytes that suffice for any launch on a GPU that runs so many clusters: 18.5 MiB on a B200."""
    return SHAPE.workspace_bytes(clusters.of(SHAPE.cluster))


def workspace(device: torch.device, clusters: Clusters) -> Tensor:
    """The device's workspace, uint8; made now if there is none.

    Raises:
        WorkspaceError: it would have to be made while a CUDA graph is captured.
    """
    needed = workspace_bytes(clusters)
    with _lock:
        found = _made.get(device)
        if found is not None and found.numel() >= needed:
            return found
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise WorkspaceError(
                f"workspace: expected {needed} bytes on {device} before a CUDA graph is captured, found none; run the"
                " warm-up, or each kernel once, before"
            )
        made = torch.empty(needed, dtype=torch.uint8, device=device)
        made[: 4 * COUNTER_WORDS] = 0
        _made[device] = made
        return made
