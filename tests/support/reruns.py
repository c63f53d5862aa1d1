"""Graphs of prompts where there is no GPU: a replay runs what would have been captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from nvfp4_sgl.prompt_graphs import PromptGraph


def rerun(graph: PromptGraph, stream: Any, pool: Any) -> None:
    """In place of :meth:`PromptGraph.capture`."""
    graph._graph = SimpleNamespace(replay=graph.forward)  # type: ignore[assignment]


@contextmanager
def instead_of_graphs() -> Iterator[None]:
    """What is captured inside the block is run anew in each replay."""
    with mock.patch.object(PromptGraph, "capture", rerun), mock.patch.object(torch.cuda, "graph_pool_handle"):
        yield
