"""Captures for a draft of a pass of the target: the mean stream behind some of its layers (specification §7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_sgl.model.layer import Place, Walk
from nvfp4_sgl.ops.drafts import stream_means

SUBLAYERS = 2
"""Sublayers of a layer: attention and experts."""


def captured_means(walk: Walk, layers: Sequence[int]) -> Tensor:
    """Compute the pass of ``walk``, which begins with layer 0; [T, len(layers) * d] in the model dtype.

    What a layer leaves is there when the next one begins, or behind the last one.

    Args:
        layers: ascending.
    """
    means, entered = [], 0

    def mean() -> Tensor:
        streams = walk.all_streams()
        return stream_means([streams]).to(streams.dtype)

    for place in walk:
        if place is Place.INPUT:
            complete, between = divmod(entered, SUBLAYERS)
            if not between and complete - 1 in layers:
                means.append(mean())
            entered += 1
    if entered // SUBLAYERS - 1 in layers:
        means.append(mean())
    return torch.cat(means, dim=-1)
