"""Attention behind a million tokens: every kind of layer against the CPU reference's on the same cached bytes.

The reference cannot compute a prompt of that length, so caches hold random entries (``tests.support.long_caches``). One
layer of each kind, with Flash's 64 heads, 64 index heads and 512 chosen entries, runs a decode step of a long request
and a short one, then a chunk behind both. Without a GPU the long one is short, too, and heads are 16, for the
interpreter's sake.

A query may choose other entries near the margin: 512 of 250,000 are more crowded there than 64 of 128 in
``test_sublayers``. So the entries themselves are compared, too.

The planted mistake is one of long positions alone: the table of slots begins again at a power of two, so that a query
finds other entries than its own there. Its window, and what it writes, stay right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cache.layout import PAGE_TOKENS
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support import native
from tests.support.interpreted import ON_GPU
from tests.support.lockstep import Recording, Replayed, check_writes, record, relative_errors, replay
from tests.support.long_caches import fill_randomly

pytestmark = pytest.mark.timeout(900)

DEVICE = "cuda" if ON_GPU else "cpu"
SHAPES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_hash_layers": 1,
    "num_attention_heads": 64 if ON_GPU else 16,
    "o_groups": 8 if ON_GPU else 2,
    "index_n_heads": 64,
    "index_topk": 512,
}
SHORT, LONG = 0, 1
CACHED_SHORT = 700
LONG_LENGTHS = (131_072, 1_000_000) if ON_GPU else (4003,)
CHUNK = 64 if ON_GPU else 6
PASSES = ({SHORT: 1, LONG: 1}, {LONG: CHUNK, SHORT: 3})
"""Tokens that each pass adds: a decode step, then a chunk."""


class Bounds(NamedTuple):
    """Relative errors of a row of attention, of one that chooses entries; the share of those that must be alike, and
    that of the bytes written that may differ."""

    attention: float
    choosing: float
    overlap: float
    written: float = 0.2


BOUNDS = {"sm_90a": Bounds(0.03, 0.4, 0.9), "sm_100a": Bounds(0.2, 0.45, 0.8)}
"""Found, interpreted: 0.004 and 0.11 a row, and all entries alike. Hopper's tensor cores add with fewer bits: a dot
product of index scores may be off by a percent, and one entry of 640 that is another moves a row by 0.05."""


class Case(NamedTuple):
    """A kind of layer on a target, behind so many tokens."""

    target: str
    kind: LayerKind
    length: int

    def __str__(self) -> str:
        return f"{self.target}-{self.kind.name}-{self.length}"


CASES = [Case(target, kind, length) for length in LONG_LENGTHS for target in native.targets() for kind in LayerKind]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with native.gemms(request.param.target):
        yield request.param


@pytest.fixture(scope="module")
def checkpoint(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=5, compress_ratios=[case.kind.value, 0], **SHAPES)
    return path


@pytest.fixture(scope="module")
def recording(case: Case, checkpoint: Path) -> Recording:
    return record(
        checkpoint,
        mode=native.MODES[case.target],
        cached={SHORT: CACHED_SHORT, LONG: case.length},
        passes=[{request: [7] * count for request, count in counts.items()} for counts in PASSES],
        capacity=capacity(case),
        fill=fill_randomly,
    )


@pytest.fixture(scope="module")
def ours(case: Case, checkpoint: Path) -> Standalone:
    return Standalone(checkpoint, target=case.target, device=DEVICE, requests=2, capacity=capacity(case))


def capacity(case: Case) -> int:
    return case.length + sum(counts[LONG] for counts in PASSES)


def overlap(found: Tensor, expected: Tensor) -> list[float]:
    """For each query the share of the reference's chosen entries that is found, too; [rows]."""
    shares = []
    for ours, theirs in zip(found, expected, strict=True):
        theirs = theirs[theirs >= 0]
        shares.append(float(torch.isin(theirs, ours).float().mean()) if len(theirs) else 1.0)
    return shares


def worst(row: Replayed, told: Recording, number: int) -> tuple[float, float]:
    """The largest relative error of a row in a pass, and the smallest overlap of the entries chosen, 1 without any."""
    expected = told.layers[number][0]
    errors = relative_errors(row.attention, expected.attention[1]).nan_to_num(torch.inf)
    shares = [1.0]
    for found, theirs in zip(row.chosen, expected.chosen, strict=True):
        shares += overlap(found, theirs)
    return float(errors.max()), min(shares)


def wraps_at(length: int) -> int:
    """The largest power of two of positions below the last quarter of ``length``."""
    return 1 << (length * 3 // 4).bit_length() - 1


@contextmanager
def wrapped(model: Standalone, length: int) -> Iterator[None]:
    """Inside the block the long request's positions begin again at :func:`wraps_at`, but for its last two pages."""
    row, begin = model.planner.slots.table[LONG], wraps_at(length)
    end = (length // PAGE_TOKENS - 1) * PAGE_TOKENS
    assert begin < end, f"{length} tokens are too few"
    kept = row[begin:end].clone()
    row[begin:end] = row[torch.arange(end - begin, device=row.device) % begin]
    try:
        yield
    finally:
        row[begin:end] = kept


def test_a_long_request_beside_a_short_one(case: Case, ours: Standalone, recording: Recording) -> None:
    bounds = BOUNDS[case.target]
    for number, found in enumerate(replay(ours, recording, [0])):
        error, share = worst(found[0], recording, number)
        print(f"{case}, pass {number}: worst row {error:.4f}, least overlap of chosen entries {share:.4f}", flush=True)
        assert error < (bounds.choosing if case.kind is LayerKind.CSA else bounds.attention)
        assert share >= bounds.overlap
        expected = recording.layers[number][0]
        check_writes(found[0].after, expected.after, expected.before, bounds.written)


def test_positions_that_begin_again_are_seen(case: Case, ours: Standalone, recording: Recording) -> None:
    """In the decode step; on a GPU in the chunk, too, which takes the interpreter five times as long."""
    bounds = BOUNDS[case.target]
    if case.kind is LayerKind.SWA:
        pytest.skip("the window ends long after the positions that begin again")
    told = recording if ON_GPU else replace(recording, passes=recording.passes[:1], layers=recording.layers[:1])
    with wrapped(ours, case.length):
        passes = replay(ours, told, [0])
    for number, found in enumerate(passes):
        error, share = worst(found[0], recording, number)
        print(f"{case}, pass {number}, wrapped: worst row {error:.4f}, least overlap {share:.4f}", flush=True)
        if case.kind is LayerKind.CSA:
            assert share < bounds.overlap
        assert error > 1.3 * (bounds.choosing if case.kind is LayerKind.CSA else bounds.attention)
