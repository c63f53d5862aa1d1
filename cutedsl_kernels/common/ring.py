"""A ring of buffers guarded by mbarriers.

``full[i]`` completes when buffer i may be read, ``empty[i]`` when it may be written again. The position in the ring is
CuTeDSL's ``PipelineState``: an index and a phase, carried through loops as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.pipeline as pipeline

from .fixed import Fixed


@dataclass(frozen=True)
class Ring(Fixed):
    """``stages`` buffers between one producing and one consuming role.

    Attributes:
        full, empty: shared-memory pointers to ``stages`` 8-byte barriers each.
        stages: buffers.
    """

    full: Any
    empty: Any
    stages: int

    def initialise(self, full_arrivals: int, empty_arrivals: int) -> None:
        """Initialise the barriers; one thread of each CTA calls this before a fence and a cluster barrier."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, full_arrivals)
            cute.arch.mbarrier_init(self.empty + stage, empty_arrivals)

    def producer(self) -> Any:
        """The producer's position: its first pass over the ring finds every buffer empty."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def consumer(self) -> Any:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)

    def wait_empty(self, position: Any) -> None:
        cute.arch.mbarrier_wait(self.empty + position.index, position.phase)

    def wait_full(self, position: Any) -> None:
        cute.arch.mbarrier_wait(self.full + position.index, position.phase)
