"""Triton launches that are bound once for operands that look the same: other operands are launched as if alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from nvfp4_sgl.errors import OperandError
from nvfp4_sgl.formats import checks, kv_entry
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, sparse_attention
from nvfp4_sgl.triton_kernels.common import chip
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.routing import route_topk
from nvfp4_sgl.triton_kernels.hyper_connection.site import Site, SiteState, hyper_connection_next
from tests.support.interpreted import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a dry run replaces the interpreter's")

D, HEADS, PAGES = 256, 32, 3
Launch = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""Kernel, grid, arguments that are no tensors, constants and options."""


def described(value: object) -> object:
    if isinstance(value, Tensor):
        return value.dtype
    return tuple(map(described, value)) if isinstance(value, tuple) else value


@pytest.fixture
def launched() -> Iterator[list[Launch]]:
    """What is launched, in order; nothing is executed."""
    seen: list[Launch] = []

    def note(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.append((self.fn.__name__, grid, tuple(map(described, args)), options))

    with mock.patch.object(InterpretedFunction, "run", note):
        yield seen


def site(tokens: int, **changes: Any) -> None:
    """``changes``: fields of the state."""
    one = Site(torch.ones(3, 24, 4 * D, dtype=torch.bfloat16), torch.ones(24), torch.ones(3), 1e-6, 1e-6, None, 3)
    state = replace(SiteState.allocate(tokens, D, "cpu"), **changes)
    streams = torch.ones(tokens, 4, D, dtype=torch.bfloat16)
    hyper_connection_next(one, streams[:, 0].contiguous(), streams, state)


def attend(tokens: int, **changes: Any) -> None:
    """``changes``: arguments of the op."""
    entries = Entries(torch.zeros(PAGES, kv_entry.page_bytes(256), dtype=torch.uint8), 256)
    operands: dict[str, Any] = {
        "q": torch.ones(tokens, HEADS, 512, dtype=torch.bfloat16),
        "window": entries,
        "window_slots": torch.zeros(tokens, 128, dtype=torch.int32),
        "sink": torch.zeros(HEADS),
        "scale": 512**-0.5,
        "out": torch.empty(tokens, HEADS, 512, dtype=torch.bfloat16),
    }
    sparse_attention(**operands | changes)


def route(tokens: int, **changes: Any) -> None:
    """``changes``: fields of the routes."""
    routes = replace(Routes.allocate(tokens, 6, 64, 16, "cpu"), **changes)
    route_topk(torch.ones(tokens, 64), torch.ones(64), 1.5, routes, torch.zeros(1, dtype=torch.int32))


OPS: dict[str, Callable[..., None]] = {"site": site, "attend": attend, "route": route}


@pytest.mark.parametrize("op", OPS)
def test_a_launch_is_that_of_its_own_size(op: str, launched: list[Launch]) -> None:
    """Sizes on both sides of where grids, tilings and numbers of launches change, in turn."""
    sizes = (1, 5, 70, 1, 300, 5, 2000, 300, 70)
    for tokens in sizes:
        OPS[op](tokens)
    bound = launched.copy()
    launched.clear()
    for tokens in sizes:
        checks.forget()
        OPS[op](tokens)
    assert bound == launched and len({str(launch) for launch in bound}) > 4


@pytest.mark.parametrize("op", ["site", "attend"])
def test_another_chip_is_tiled_for_anew(op: str, launched: list[Launch]) -> None:
    for processors in (8, 132):
        with chip.assume(processors):
            OPS[op](5)
    assert launched[0] != launched[1]


@pytest.mark.parametrize(
    ("op", "change", "message"),
    [
        ("site", lambda: {"x": torch.empty(5, D)}, "x: expected dtype torch.bfloat16"),
        ("site", lambda: {"x": torch.empty(D, 5, dtype=torch.bfloat16).t()}, "x: expected a contiguous tensor"),
        ("site", lambda: {"post": torch.empty(5, 4, device="meta")}, "post: expected device cpu"),
        ("site", lambda: {"workspace": torch.empty(7)}, "workspace: expected at least"),
        ("attend", lambda: {"sink": torch.zeros(HEADS + 1)}, "sink: expected shape"),
        ("attend", lambda: {"window_slots": torch.zeros(5, 128, dtype=torch.int16)}, "window_slots: expected dtype"),
        ("attend", lambda: {"out": torch.empty(5, 512, HEADS, dtype=torch.bfloat16).mT}, "out: expected a contiguous"),
        ("attend", lambda: {"splits": 0}, r"splits: expected a value in \[1"),
        ("route", lambda: {"weights": torch.empty(5, 6, dtype=torch.bfloat16)}, "weights: expected dtype"),
        ("route", lambda: {"destination": torch.empty(6, 5, dtype=torch.int32).t()}, "destination: expected a contig"),
        ("route", lambda: {"tile": 2000}, r"tile: expected a value in \[1, 1024\]"),
    ],
)
def test_a_wrong_operand_is_refused_after_right_ones(
    op: str, change: Any, message: str, launched: list[Launch]
) -> None:
    for _ in range(2):
        OPS[op](5)
        before = len(launched)
        with pytest.raises(OperandError, match=message):
            OPS[op](5, **change())
        assert len(launched) == before
