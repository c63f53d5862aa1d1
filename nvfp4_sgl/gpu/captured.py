"""CUDA graphs: a decode pass of :class:`~nvfp4_sgl.gpu.standalone.GpuStandalone`, and anything else that may be one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nvfp4_sgl.gpu.standalone import GpuStandalone, Pass
from nvfp4_sgl.gpu.step import Step


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what ``run`` launches, after one run aside that compiles and loads what it needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        run()
    return graph


class CapturedDecode:
    """One token of each of ``count`` requests, captured; the runner's buffers are this object's.

    The capture runs request 0 at position 0, so what stands there is lost.

    Attributes:
        graph: replays the pass on the buffers as they are.
    """

    def __init__(self, model: GpuStandalone, count: int):
        self._model = model
        device = model.device
        ids, self._positions, self._requests = torch.zeros(3, count, dtype=torch.int64, device=device).unbind()
        lengths = torch.ones(count, dtype=torch.int64, device=device)
        step = Step.allocate(
            model.config,
            model.decoder.scratch,
            self._positions,
            self._requests,
            model.slots,
            model.caches.advance({0: 0}).full_to_swa.to(device),
            longest=model.caches.capacity,
            decode=True,
        )
        self._work = Pass(ids, step, lengths, None)
        self._logits = torch.empty(0)
        self.graph = capture(self._forward)

    def _forward(self) -> None:
        self._logits = self._model.forward(self._work)

    def __call__(self, tokens: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """fp32 logits [1, vocabulary] by request, of one more token each, for as many requests as were captured."""
        batch = self._model.caches.advance(dict.fromkeys(tokens, 1))
        self._work.ids.copy_(torch.tensor([ids[0] for ids in tokens.values()]))
        self._positions.copy_(batch.starts)
        self._requests.copy_(batch.requests)
        self._work.ends.copy_(batch.ends)
        self.graph.replay()
        return dict(zip(tokens, self._logits.clone().split(1), strict=True))
