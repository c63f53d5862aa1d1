"""Prompt passes in CUDA graphs: a first token then waits for the GPU alone, not for Python's launches.

A graph holds the body of a pass, from token ids to the hidden states of all tokens, and the plan in front of it. It
reads where tokens stand from tensors of its own (:class:`~nvfp4_sgl.model.static_prompt.StaticPrompt`), so one graph
serves whatever prefixes are cached. The launches of a pass depend on its shape alone; the graph's bits are those of an
eager pass of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.captured import capture
from nvfp4_sgl.model.contract import PassRequest, Planner
from nvfp4_sgl.model.static_prompt import PromptSize, StaticPrompt, choose

Body = Callable[[Tensor, Any], Tensor]
"""Hidden states [T, d] from token ids int64 [T] and the pass's step; launches kernels only."""


class PromptGraph:
    """Prompt passes of one shape, captured.

    Attributes:
        prompt: the tensors that it reads. step: its plan, of the target's planner.
        hidden: [tokens, d], what the pass that was captured or replayed last wrote.
        replays: how many passes ran in this graph.
    """

    def __init__(self, planner: Planner[Any], body: Body, prompt: StaticPrompt):
        self.prompt, self._planner, self._body = prompt, planner, body
        self.step = planner.capture(prompt.request)
        self.hidden = torch.empty(0)
        self.replays = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def forward(self) -> None:
        """Launch the pass on the tensors as they are."""
        self._planner.fill(self.step, self.prompt.request)
        self.hidden = self._body(self.prompt.ids, self.step)

    def capture(self, stream: torch.cuda.Stream | None, pool: Any) -> None:
        """Run the pass once, for what is left to compile, and capture it."""
        self._graph = capture(self.forward, stream=stream, pool=pool)

    def load(self, request: PassRequest) -> None:
        """Take over where the tokens of the next pass stand."""
        self.prompt.load(request)

    def replay(self, ids: Tensor) -> Tensor:
        """Hidden states [T, d] of the tokens that were loaded, int [T]; the next replay of any graph may overwrite
        them."""
        assert self._graph is not None, "capture has not run"
        self.prompt.load_ids(ids)
        self._graph.replay()
        self.replays += 1
        return self.hidden[: self.prompt.used]


class PromptGraphs:
    """Captured prompts of several shapes, which share memory: one runs at a time.

    Args:
        planner: the target's, whose fused kernels run.
        body: of the pass.
        shapes: from :func:`~nvfp4_sgl.model.static_prompt.shapes`, the largest first.
        device: where their tensors are.
        padding_request: the request slot of padding.
    """

    def __init__(
        self,
        planner: Planner[Any],
        body: Body,
        shapes: Iterable[PromptSize],
        device: torch.device | str,
        padding_request: int = 0,
    ):
        self._graphs = {
            shape: PromptGraph(planner, body, StaticPrompt(shape, device, padding_request)) for shape in shapes
        }

    @property
    def shapes(self) -> list[PromptSize]:
        """Those that are captured."""
        return list(self._graphs)

    @property
    def replays(self) -> int:
        """Passes that ran in graphs."""
        return sum(graph.replays for graph in self._graphs.values())

    def capture(self, stream: torch.cuda.Stream | None = None) -> None:
        """Capture all, on ``stream`` or one of their own; the caches' padding is overwritten."""
        pool = torch.cuda.graph_pool_handle()
        for graph in self._graphs.values():
            graph.capture(stream, pool)

    def find(self, request: PassRequest) -> PromptGraph | None:
        """The graph that holds the pass, ``None`` if none does."""
        assert request.longest is not None, "the host knows the lengths of a prompt pass"
        shape = choose(self._graphs, request.positions.shape[0], request.requests.shape[0], request.longest)
        return None if shape is None else self._graphs[shape]
