"""Captures for a draft of a pass of the target: the mean stream behind some of its layers (specification §7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from nvfp4_sgl.model.layer import Place, Walk

SUBLAYERS = 2
"""Sublayers of a layer: attention and experts."""


def captured_means(walk: Walk, layers: Sequence[int], capture: Callable[[Tensor, Tensor], object]) -> Tensor:
    """Compute the pass of ``walk``, which begins with layer 0; [T, len(layers) * d] in the model dtype.

    What a layer leaves is there when the next one begins, or behind the last one.

    Args:
        layers: one column each, in this order.
        capture: of the target's :class:`~nvfp4_sgl.model.contract.DsparkBoundaries`.
    """
    tokens, _, width = walk.streams.shape
    means = walk.streams.new_empty(tokens, len(layers) * width)
    columns = dict(zip(layers, means.split(width, dim=1), strict=True))
    entered = 0
    for place in walk:
        if place is Place.INPUT:
            complete, between = divmod(entered, SUBLAYERS)
            if not between and complete - 1 in columns:
                capture(walk.all_streams(), columns[complete - 1])
            entered += 1
    last = entered // SUBLAYERS - 1
    if last in columns:
        capture(walk.all_streams(), columns[last])
    return means
