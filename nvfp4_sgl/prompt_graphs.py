"""Prompt passes in CUDA graphs: a first token then waits for the GPU alone, not for Python's launches.

A graph holds the body of a pass, from token ids to the hidden states of all tokens, and the plan in front of it; with a
draft, what that reads of the pass, too. It reads where tokens stand from tensors of its own
(:class:`~nvfp4_sgl.model.static_prompt.StaticPrompt`), so one graph serves whatever prefixes are cached. The launches
of a pass depend on its shape alone; the graph's bits are those of an eager pass of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.captured import capture
from nvfp4_sgl.model.contract import PassRequest, Planner
from nvfp4_sgl.model.static_prompt import PromptSize, StaticPrompt, choose

Body = Callable[[Tensor, Any], tuple[Tensor, Tensor | None]]
"""(hidden states [T, d], streams [T, n * d] for a draft that reads them) from token ids int64 [T] and the pass's step;
launches kernels only."""


class Streams:
    """Room for streams that a draft reads, as much as the first graph needs, which is the largest.

    Every graph writes to it: in memory of its own each would hold the streams of its tokens for good.
    """

    def __init__(self) -> None:
        self._room: Tensor | None = None

    def keep(self, streams: Tensor | None) -> Tensor | None:
        """``streams`` [T, n * d] in the room; nothing is kept where no draft reads them."""
        if streams is None:
            return None
        if self._room is None:
            self._room = torch.empty_like(streams)
        return self._room[: len(streams)].copy_(streams)


class PromptGraph:
    """Prompt passes of one shape, captured.

    Attributes:
        prompt: the tensors that it reads. step: its plan, of the target's planner.
        hidden: [tokens, d], what the pass that was captured or replayed last wrote.
        streams: [tokens, n * d] of that pass, if a draft reads them.
        replays: how many passes ran in this graph.
    """

    def __init__(self, planner: Planner[Any], body: Body, prompt: StaticPrompt, room: Streams):
        self.prompt, self._planner, self._body, self._room = prompt, planner, body, room
        self.step = planner.capture(prompt.request)
        self.hidden = torch.empty(0)
        self.streams: Tensor | None = None
        self.replays = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def forward(self) -> None:
        """Launch the pass on the tensors as they are."""
        self._planner.fill(self.step, self.prompt.request)
        self.hidden, streams = self._body(self.prompt.ids, self.step)
        self.streams = self._room.keep(streams)

    def capture(self, stream: torch.cuda.Stream | None, pool: Any) -> None:
        """Run the pass once, for what is left to compile, and capture it."""
        self._graph = capture(self.forward, stream=stream, pool=pool)

    def load(self, request: PassRequest) -> None:
        """Take over where the tokens of the next pass stand."""
        self.prompt.load(request)

    def replay(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs of the body for the tokens that were loaded, int [T]; they hold until any graph is replayed next."""
        assert self._graph is not None, "capture has not run"
        self.prompt.load_ids(ids)
        self._graph.replay()
        self.replays += 1
        used = self.prompt.used
        return self.hidden[:used], None if self.streams is None else self.streams[:used]


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
        room = Streams()
        self._graphs = {
            shape: PromptGraph(planner, body, StaticPrompt(shape, device, padding_request), room) for shape in shapes
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
