"""launch/bench_hopper_overlap without a GPU: it launches reference GEMMs and reads a clock that knows their times."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels import launcher
from nvfp4_sgl.cutedsl_kernels.compiled import KernelKey
from nvfp4_sgl.cutedsl_kernels.sm90.choose import H200_CLUSTERS
from nvfp4_sgl.cutedsl_kernels.sm90.shape import KernelShape
from tests.packaging.checkout import ROOT
from tests.support.reference_gemms import ReferenceLauncher, reference_gemms
from tests.support.released import FLASH, config_json

sys.path.append(str(ROOT / "launch"))  # its scripts import each other by bare name

from benchmarks import hopper, hopper_experts, hopper_overlap
from benchmarks.hopper import Gemm
from benchmarks.hopper_overlap import Bench, Ranks, Report, Run, check_same, launched, layer_gemms
from benchmarks.hopper_overlap_report import HEADER, LAYER_HEADER, LayerRow, Row, Times, fit, fit_lines

LAYER = hopper_experts.Layer("tiny", 2, experts=9, visits=4, width=128, inner=128, limit=10.0)
SIZES = [(1, 256, 128, "fp32"), (1, 384, 128, "bf16"), (2, 128, 64, "bf16"), (1, 128, 256, "bf16")]
BANDWIDTH = 1e12
ORDINARY = {"small": 2.0, "dense": 5.0, "gate, up": 9.0, "down": 6.0}
OVERLAP = {"small": 1.0, "gemm": 0.6}
"""Microseconds hidden of a GEMM that waits first, by the kernel in front; and what reading ahead adds."""
WEIGHTS, EXPERTS = {"small": 0.5, "gemm": 0.2}, {"small": 0.75, "gemm": 0.25}
SMALL_HIDDEN = 0.8


def gemm_of(key: KernelKey) -> str:
    assert isinstance(key.shape, KernelShape)
    return "dense" if not key.shape.grouped else "gate, up" if key.shape.gated else "down"


class Clock:
    """Takes the time of launches for what ORDINARY and the other tables say."""

    def __init__(self) -> None:
        self.smalls = 0

    def small(self) -> None:
        self.smalls += 1

    def __call__(self, runs: Sequence[Run]) -> float:
        runner = launcher.current()
        assert isinstance(runner, ReferenceLauncher)
        seen: list[tuple[str, KernelKey | None]] = []
        for run in runs:
            smalls, keys = self.smalls, len(runner.keys)
            run()
            assert (self.smalls - smalls) + (len(runner.keys) - keys) == 1, "a run is one launch"
            key = runner.keys[-1] if self.smalls == smalls else None
            assert key is None or key.programmatic_launch == runner.programmatic_launch
            seen.append((gemm_of(key) if key else "small", key))
        fronts = ["small" if name == "small" else "gemm" for name, _ in seen[-1:] + seen[:-1]]
        hidden = sum(self.hidden(front, name, key) for front, (name, key) in zip(fronts, seen, strict=True))
        return sum(ORDINARY[name] for name, _ in seen) - runner.programmatic_launch * hidden

    def hidden(self, front: str, name: str, key: KernelKey | None) -> float:
        if key is None:
            return SMALL_HIDDEN
        assert isinstance(key.shape, KernelShape)
        ahead = WEIGHTS if name == "dense" else EXPERTS if key.shape.counts_ahead else {}
        return OVERLAP[front] + ahead.get(front, 0.0)


@pytest.fixture(autouse=True, scope="module")
def few_copies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches, reference_gemms("sm_90a"):
        for module in (hopper, hopper_experts):
            patches.setattr(module, "ROTATED_BYTES", 40_000)
        for module in (hopper_overlap, hopper_experts):
            patches.setattr(module, "ROUTES", 2)
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, few_copies: None) -> dict[str, Any]:
    """The report of two numbers of tokens."""
    torch.manual_seed(0)
    tmp_path, clock = tmp_path_factory.mktemp("overlap"), Clock()
    bench = Bench(clock, clock.small)
    report = Report({"chip": "a chip"}, tmp_path / "overlap.json")
    gemms = [Gemm("tiny", 2, f"dense {size}", *size) for size in SIZES]  # type: ignore[arg-type]
    known: dict[Any, Row] = {}
    weights = Ranks(2, gemms, LAYER, SIZES, "cpu")
    for tokens in (1, 16):
        weights.measure(bench, tokens, BANDWIDTH, known, report)
    weights.measure(bench, 1, BANDWIDTH, known, report)
    found: dict[str, Any] = json.loads((tmp_path / "overlap.json").read_text())
    return found


def test_the_fit_finds_the_clocks_constants(found: dict[str, Any]) -> None:
    for tokens in ("1", "16"):
        for front in ("small", "gemm"):
            constants = {name: one["us"] for name, one in found["fit"][tokens][front].items()}
            expected = {"overlap": OVERLAP[front], "weights": WEIGHTS[front], "experts": EXPERTS[front]}
            assert constants == pytest.approx(expected), (tokens, front)


def test_rows_are_those_of_each_gemm_once(found: dict[str, Any]) -> None:
    rows = [(row["name"], row["tokens"], row["ahead"]) for row in found["rows"]]
    assert len(rows) == len(set(rows)) == 2 * (len(SIZES) + 3)
    for row in found["rows"]:
        ordinary = ORDINARY["dense" if "dense" in row["name"] else "down" if "w2" in row["name"] else "gate, up"]
        times, floor = row["behind_gemm"], row["floor_us"]
        assert times["ordinary"] == pytest.approx(ordinary) and 0 < floor < 1
        assert row["behind_small"]["ordinary"] == pytest.approx(ordinary), "the small kernel's time is taken off"
        hidden = times["ordinary"] - times["overlapped"]
        assert row["share"]["behind_gemm"] == pytest.approx(hidden / (ordinary - floor))


def test_a_layer_has_its_gemms_in_order(found: dict[str, Any]) -> None:
    layer = found["layers"][0]
    ordinary = 4 * ORDINARY["dense"] + ORDINARY["gate, up"] + ORDINARY["down"] + 4 * ORDINARY["small"]
    hidden = 4 * SMALL_HIDDEN + 3 * (OVERLAP["small"] + WEIGHTS["small"]) + OVERLAP["gemm"] + WEIGHTS["gemm"]
    hidden += OVERLAP["small"] + OVERLAP["gemm"]
    assert layer["launches"] == 10 and layer["ahead"]["ordinary"] == pytest.approx(ordinary)
    assert layer["waiting"]["overlapped"] == pytest.approx(ordinary - hidden)
    assert layer["ahead"]["overlapped"] == pytest.approx(ordinary - hidden - EXPERTS["gemm"])
    assert layer["parts_us"] == pytest.approx(layer["ahead"]["overlapped"])


def test_a_graph_reads_every_copy_of_the_weights() -> None:
    """So that L2 holds none of them when their turn comes again."""
    operands = hopper.Operands(Gemm("tiny", 2, "wo_b", *SIZES[3]), device="cpu")  # type: ignore[arg-type]
    read: list[int] = []
    with mock.patch.object(operands, "run", lambda index, *_: read.append(operands.weights[index].tiles.data_ptr())):
        measured = hopper_overlap.measured_dense(operands, 3)
        for run in measured.runs:
            run()
    assert len(set(read)) == len(read) and len(read) * operands.bytes >= hopper.ROTATED_BYTES
    assert measured.weight_bytes == operands.bytes
    weights = hopper_experts.Weights(LAYER, "cpu")
    case = hopper_experts.Case(weights, 1, "cpu")
    visited = {weights.tiled[run % len(weights.tiled)][0].tiles.data_ptr() for run in range(hopper_overlap.ROUTES)}
    assert len(visited) == LAYER.copies
    floors = [one.weight_bytes for one in hopper_overlap.measured_experts(case, "cpu")]
    assert floors == pytest.approx([case.visited * LAYER.expert_bytes * part / 3 for part in (2, 1, 1)])


def test_launches_are_dependents_or_ordinary() -> None:
    module = hopper_overlap.sum_of_experts
    before = launcher.current()
    with mock.patch.object(module, "OVERLAPPED", {"launch_pdl": True}):
        for overlapped in (True, False):
            with launched(overlapped):
                assert launcher.current().programmatic_launch is overlapped
                assert bool(module.OVERLAPPED) is overlapped
    assert launcher.current() is before


def test_results_that_differ_are_refused() -> None:
    out = torch.zeros(4)
    check_same(lambda: out.fill_(2.0), out)
    with pytest.raises(AssertionError, match="results differ"):
        check_same(lambda: out.fill_(float(launcher.current().programmatic_launch)), out)


def test_the_layer_of_flash() -> None:
    """Its dense GEMMs are among those that are timed, on any number of ranks."""
    config = ModelConfig.from_dict(config_json(FLASH))
    for ranks in (1, 2, 4, 8):
        sizes = [hopper_overlap.size_of(gemm) for gemm in hopper.gemms(["flash"], [ranks])]
        of_layer = layer_gemms(config, ranks)
        assert len(of_layer) == len(hopper_overlap.BEHIND_SMALL) - 2 and set(of_layer) <= set(sizes)
        assert of_layer[0][3] == "fp32" and of_layer[2][0] == 8 // ranks


def test_kernels_are_compiled_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The down GEMM that waits first, and the one that reads counts ahead."""
    monkeypatch.setattr(ReferenceLauncher, "clusters", lambda self, device: H200_CLUSTERS)
    shapes, limit = hopper_overlap.shapes_of([1, 8], [1, 64])
    downs = [shape for shape in shapes if shape.grouped and not shape.gated]
    assert {shape.counts_ahead for shape in downs} == {True, False} and limit == 10.0
    assert any(shape.gated for shape in shapes) and any(not shape.grouped for shape in shapes)


def test_tables_line_up() -> None:
    times = Times(5.0, 3.5)
    row = Row(2, "wo_b", 1, 4096, 4096, 1, "weights", (8, 4, 1), 2.0, times, times)
    assert "1.50 (50%)" in row.text() and row.text().count("|") == HEADER.splitlines()[0].count("|")
    layer = LayerRow(2, 1, 10, times, times, 3.0)
    assert layer.text().count("|") == LAYER_HEADER.splitlines()[0].count("|")
    assert not fit_lines(fit([], [])) and fit([row], [])["1"]["small"] == {"overlap": {}, "weights": {}, "experts": {}}
    slower = Row(2, "wo_b", 1, 4096, 4096, 1, "nothing", (8, 4, 1), 6.0, times, times)
    assert slower.share(times) == 0.0 and len(fit_lines(fit([row, slower], []))) == 4
