"""A stage of the ring as the warps that multiply see it: load a lane's part of its weights, expand them, release it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute

from ..common.fragment import EpilogueWarp
from ..common.ring import Ring
from .expand import expand_half
from .fp8_expand import expand_fp8_half
from .shape import KernelShape
from .weights import load_fp8_half, load_half

LOAD_HALF = {"nvfp4": load_half, "fp8": load_fp8_half}
"""How a lane's part of half a tile is loaded, by how weights are stored."""
EXPAND_HALF = {"nvfp4": expand_half, "fp8": expand_fp8_half}
"""How that becomes A fragments."""


def load_stage_half(shape: KernelShape, staged: Any, warp: EpilogueWarp, half: int) -> list[Any]:
    """This lane's part of half a staged tile of weights: ``weights.HALF_WORDS`` words."""
    return LOAD_HALF[shape.weights](staged, warp.index, warp.lane, half)


def expanded(shape: KernelShape, words: Sequence[Any]) -> list[Any]:
    """Half a stage's weights, as the A fragments of four steps of 16: four registers each."""
    return list(EXPAND_HALF[shape.weights](words))


@cute.jit
def release(ring: Ring, index: Any) -> None:
    """The load warp may fill the stage again: this warp has read it."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.empty + index)
