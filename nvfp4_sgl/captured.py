"""CUDA graphs of whatever launches kernels only: a decode pass with no server around it, for instance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.model.contract import PassRequest
from nvfp4_sgl.standalone import Pass, Standalone


def capture(
    run: Callable[[], object], *, stream: torch.cuda.Stream | None = None, pool: Any = None
) -> torch.cuda.CUDAGraph:
    """A graph of what ``run`` launches, after one run aside that compiles and loads what it needs.

    Args:
        stream: for both; unless given one of their own.
        pool: ``torch.cuda.graph_pool_handle()``, whose memory the graph shares; unless given it has its own.
    """
    side = stream or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream), torch.no_grad():
        run()
    return graph


class CapturedDecode:
    """One token of each of ``count`` requests of a :class:`Standalone`, captured; its buffers are this object's.

    The capture runs request 0 at position 0, so what stands there is lost.

    Attributes:
        graph: replays the pass on the buffers as they are.
        logits: fp32 [count, vocabulary], what the pass that was captured last writes.
    """

    def __init__(self, model: Standalone, count: int):
        self._model = model
        self._ids, positions, requests, ends = torch.zeros(4, count, dtype=torch.int64, device=model.device).unbind()
        ends.fill_(1)
        self._request = PassRequest(positions, requests, ends)
        model.planner.reserve(count)
        self._step = model.planner.capture(self._request)
        self.logits = torch.empty(0)
        self.graph = capture(self.forward)

    def forward(self) -> None:
        """Launch the pass on the buffers as they are."""
        self._model.planner.fill(self._step, self._request)
        self.logits = self._model.forward(Pass(self._ids, self._request, self._step))

    def __call__(self, tokens: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """fp32 logits [1, vocabulary] by request, of one more token each, for as many requests as were captured."""
        starts, ends = self._model.caches.advance(dict.fromkeys(tokens, 1))
        self._ids.copy_(torch.tensor([ids[0] for ids in tokens.values()]))
        for buffer, values in ((self._request.positions, starts), (self._request.ends, ends)):
            buffer.copy_(torch.tensor(values))
        self._request.requests.copy_(torch.tensor(list(tokens)))
        self.graph.replay()
        return dict(zip(tokens, self.logits.clone().split(1), strict=True))
