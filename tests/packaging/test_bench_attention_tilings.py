"""The parts of launch/bench_attention_tilings that need no GPU: what is measured, what is refused, the table's rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks import attention_tilings
from benchmarks.attention_tilings import CANDIDATES, Inputs, Resources, Shape, line, measured

from nvfp4_sgl.triton_kernels.attention.tiling import HOPPER, SIXTEEN_HEADS, THIRTY_TWO_HEADS, Tiling

BROKEN, WRONG = Tiling(keys=16), Tiling(keys=32)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4_sgl.triton_kernels.common.chip.is_before_blackwell", lambda: True)


class FakeInputs:
    """Results and launches without a device: one tiling fails, one is wrong."""

    shape = Shape(64, 32, 256, quantized=False)

    def result(self, tiling: Tiling, splits: int) -> Tensor:
        if tiling == BROKEN:
            raise RuntimeError("no room")
        return torch.full((4,), 2.0 if tiling == WRONG else 1.0 + 0.001 * splits)

    def launch(self, tiling: Tiling, splits: int, *, quantized: bool) -> Any:
        return (tiling, splits, quantized)


def test_what_fails_or_is_wrong_is_reported_and_not_timed() -> None:
    timed: list[Any] = []

    def timer(launch: Any) -> float:
        timed.append(launch)
        return 10.0 + launch[1]

    candidates = {"good": THIRTY_TWO_HEADS, "broken": BROKEN, "wrong": WRONG}
    found = list(
        measured(cast(Inputs, FakeInputs()), candidates, 132, cast(Callable[[Callable[[], None]], float], timer))
    )
    assert found[:4] == [("present", 2, 12.0), ("good", 1, 11.0), ("good", 2, 12.0), ("good", 4, 14.0)]
    assert {us for name, _, us in found if name == "broken"} == {"RuntimeError: no room"}
    assert all(str(us).startswith("wrong: 0.99") for name, _, us in found if name == "wrong")
    assert {launch[0] for launch in timed} == {THIRTY_TWO_HEADS}
    assert line(FakeInputs.shape, found[:3]) == "| 64 x 128+256 | 12.0/2 | 11.0/1 (12.0/2) |"
    assert line(FakeInputs.shape, [("a", 1, "wrong: 2"), ("a", 2, 3.0)]) == "| 64 x 128+256 | 3.0/2 /1 wrong: 2 |"


def test_splits_have_places_and_tiles() -> None:
    assert Shape(1, 32, 8, False).splits(132, SIXTEEN_HEADS) == [1, 2, 4, 5]
    assert Shape(64, 32, 512, False).splits(132, HOPPER) == [1, 2]
    assert Shape(64, 32, 512, False).splits(132, THIRTY_TWO_HEADS) == [1, 2, 4]
    assert Shape(8192, 32, 512, False).splits(132, THIRTY_TWO_HEADS) == [1]


def test_how_many_programs_a_multiprocessor_holds() -> None:
    assert Resources(255, 0, 82432).resident(4) == 2
    assert Resources(128, 0, 82432).resident(8) == 2
    assert Resources(129, 0, 82432).resident(8) == 1
    assert Resources(64, 0, 223232).resident(8) == 1


def test_every_candidate_is_of_hopper_and_named_once() -> None:
    assert len(set(CANDIDATES.values())) == len(CANDIDATES)
    assert not any(tiling.transposed for tiling in CANDIDATES.values())
    assert {HOPPER, SIXTEEN_HEADS, THIRTY_TWO_HEADS} <= set(CANDIDATES.values())


def test_it_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_attention_tilings"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        attention_tilings.main()
