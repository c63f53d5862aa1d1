"""The parts of launch/bench_kernels that need no GPU: floors, judged peers, the table and the summary."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks import families
from benchmarks.families import Case, Peer, relative_error
from benchmarks.kernel_report import Chip, Row, judge, measure, summary

CHIP = Chip("a chip", bandwidth=1e12, rate=1e15, empty_us=1.5)


def op(us: float) -> Callable[[], object]:
    """Something that :func:`stopwatch` finds to take ``us``."""
    return lambda: us


def stopwatch(run: Callable[[], object]) -> float:
    us = run()
    assert isinstance(us, float)
    return us


def broken() -> object:
    raise RuntimeError("no image | for this device\nand more")


def case(us: float, name: str = "op/flash/8192x64", peers: Any = None) -> Case:
    return Case(name, op(us), 8_000_000, peers=peers or {})


@pytest.mark.parametrize(
    ("moved", "flops", "floor"),
    [
        (1_000_000, 0, (1.0, "bytes")),
        (1_000_000, 900_000_000, (1.0, "bytes")),
        (1_000_000, 2_000_000_000, (2.0, "flops")),
    ],
)
def test_floor_is_the_larger_of_both(moved: int, flops: int, floor: tuple[float, str]):
    assert CHIP.floor(Case("op/flash/1", op(1.0), moved, flops)) == pytest.approx(floor)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("quantize/flash/8192x4096", 8192), ("rope_turns/64", 64), ("topk/pro/8x64k", 8), ("rope/flash/all", 0)],
)
def test_tokens_come_from_the_name(name: str, tokens: int):
    assert case(1.0, name).tokens == tokens


def test_a_peer_is_compared_after_both_ran_then_timed():
    order: list[str] = []

    def ours() -> None:
        order.append("ours")

    def theirs() -> float:
        order.append("theirs")
        return 4.0

    def error() -> float:
        order.append("error")
        return 0.001

    assert judge(Peer(theirs, error), ours, stopwatch).us == 4.0
    assert order == ["ours", "theirs", "error", "theirs"]


@pytest.mark.parametrize("error", [0.02, float("nan"), float("inf")])
def test_a_disagreeing_peer_is_not_timed(error: float):
    judged = judge(Peer(op(4.0), lambda: error), op(1.0), stopwatch)
    assert judged.us is None
    assert "disagrees" in judged.problem


def test_relative_error_is_nan_where_a_result_is():
    ours = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), ours) == pytest.approx(0.1)
    assert not relative_error(torch.tensor([3.0, float("nan")]), ours) <= 1


def test_a_failing_peer_or_case_costs_nothing_else():
    row = measure(
        "family", case(8.0, peers={"a": broken, "b": op(16.0), "c": Peer(broken, lambda: 0.0)}), CHIP, stopwatch
    )
    assert row.us == 8.0 and row.best_peer == ("b", 16.0)
    for name in "ac":
        assert row.peers[name].problem == "RuntimeError: no image / for this device"
    line = row.line(CHIP.empty_us)
    assert "b 16.0 (2.00x)" in line and "a: RuntimeError" in line and "8.0 (bytes) | 100%" in line and "| 6.5 |" in line
    failed = measure("family", Case("op/flash/8x64", broken, bytes=1), CHIP, stopwatch)
    assert failed.us is None and "failed: RuntimeError" in failed.line(CHIP.empty_us)
    assert line.count("|") == failed.line(CHIP.empty_us).count("|")
    json.dumps([row.as_json(), failed.as_json()])


@pytest.mark.parametrize(("without", "left"), [(None, ["a (nvcc)", "b"]), ("nvcc", ["b"]), ("", [])])
def test_peers_can_be_left_out(without: str | None, left: list[str]):
    peers = {"a (nvcc)": op(9.0), "b": op(9.0)}
    assert list(measure("family", case(8.0, peers=peers), CHIP, stopwatch, without=without).peers) == left


def test_summary_names_what_misses_a_goal():
    def row(us: float, name: str, **peers: Peer | Callable[[], object]) -> Row:
        return measure("family", case(us, name, peers), CHIP, stopwatch)

    rows = [
        row(9.0, "good/flash/8192x64", slower=op(9.5), mark=Peer(op(1.0), part=True)),
        row(20.0, "far/flash/8192x64"),
        row(20.0, "small/flash/64x64"),
        row(9.0, "beaten/flash/8192x64", a=op(8.0), b=op(4.5)),
        row(9.0, "lonely/flash/8192x64", gone=broken),
        measure("family", Case("dead/flash/8x64", broken, bytes=1), CHIP, stopwatch),
    ]
    text = "\n".join(summary(rows))
    assert "5 of 6 cases measured" in text
    sections: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines()[1:]:
        if line.startswith(" "):
            sections[title].append(line.strip().split("/")[0].split(",")[0])
        else:
            title = line.split(":")[0]
            sections[title] = []
    assert sections["failed"] == ["dead"]
    assert sections["below 85% of the floor at 8192 tokens or more"] == ["far"]
    assert sections["slower than a peer"] == ["beaten"] and "b 0.50x" in text
    assert sections["peers without a time"] == ["family"] and "gone: RuntimeError" in text


@pytest.mark.parametrize("family", sorted(module.name for module in pkgutil.iter_modules(families.__path__)))
def test_families_import_without_a_gpu(family: str):
    """And without any peer's package: those are looked for when cases are built."""
    before = set(sys.modules)
    assert callable(importlib.import_module(f"benchmarks.families.{family}").cases)
    peers = {"sglang", "deep_gemm", "flash_mla", "sgl_kernel", "tilelang"}
    assert not peers & {name.split(".")[0] for name in set(sys.modules) - before}
