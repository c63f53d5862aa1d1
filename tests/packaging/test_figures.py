"""Measured figures: launch/results/figures is well formed, and launch/bench_full --record writes such files."""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.checkout import ROOT

sys.path.append(str(ROOT / "launch"))  # its packages are imported by bare name
from benchmarks import figures, full_size, full_size_record

RUN = {"case": "flash", "machine": "NVIDIA H200", "date": "2026-11-26", "source": "flash_tp2_h200.md"}
ONE = {"metric": "time per output token, mean", "unit": "ms", "value": 3.5, "requests": 1}


def write(folder: Path, name: str, run: dict[str, Any], *lines: dict[str, Any]) -> Path:
    (folder / name).write_text(json.dumps({"run": run, "figures": list(lines)}))
    return folder / name


@pytest.mark.parametrize("file", sorted(figures.FIGURES.glob("*.json")), ids=lambda file: file.stem)
def test_a_recorded_run_is_well_formed(file: Path) -> None:
    assert figures.read(file)


def test_whole_flash_is_recorded_as_its_notebooks_say() -> None:
    """Looked up by hand."""
    found = {(one.case, one.metric, one.requests, one.prompt): one for one in figures.recorded()}
    at_64 = found["flash_tp2", "output tokens per second", 64, 1024]
    assert (at_64.value, at_64.peer_value, at_64.code, at_64.date) == (1987, 1416, "1125735", "2026-11-26")
    first = found["flash_tp4", "time to first token, median", 1, 8192]
    assert (first.value, first.peer_value, first.unit, first.cards, first.tp) == (242, 366, "ms", 4, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": None}, "figure 0: expected unit, found none"),
        ({"speed": 3}, "figure 0: speed: unknown"),
        ({"value": "3.5"}, "figure 0: value: expected .*Decimal.*, found '3.5'"),
        ({"requests": 1.5}, "figure 0: requests: expected int"),
        ({"peer_value": 2.0}, "figure 0: peer_value: expected peer beside it"),
        ({"date": "26 November"}, "figure 0: date: expected 2026-11-26"),
        ({"source": "gone.md"}, "figure 0: source: expected a file of launch/results"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_figure_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path, "run.json", RUN, ONE | change)
    with pytest.raises(ValueError, match=f"{file}: {message}"):
        figures.read(file)


def test_the_newest_figure_of_a_case_counts(tmp_path: Path) -> None:
    write(tmp_path, "a.json", RUN | {"date": "2026-11-27T10:00Z"}, ONE | {"value": 3.1, "peer": "x", "peer_value": 6.2})
    write(tmp_path, "b.json", RUN, ONE, ONE | {"requests": 2, "value": 4.5})
    write(tmp_path, "c.json", RUN | {"date": "2026-11-27T09:00Z"}, ONE | {"value": 3.3})
    assert [one.value for one in figures.recorded(tmp_path)] == [Decimal("3.1"), Decimal("4.5")]
    assert figures.recorded(tmp_path)[0].ratio == 0.5
    write(tmp_path, "d.json", RUN | {"date": "2026-11-27T10:00Z"}, ONE)
    with pytest.raises(ValueError, match="two figures of 2026-11-27T10:00Z; add the time of day"):
        figures.recorded(tmp_path)


def served(tpot: float, rate: float) -> dict[str, float]:
    return {"mean_tpot_ms": tpot, "median_tpot_ms": tpot, "median_ttft_ms": 99.0, "output_throughput": rate}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``launch/bench_full`` with given arguments whose servers say what is given, and a GPU of a name."""
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(full_size, "problems", lambda *_: [])
    monkeypatch.setattr(full_size.Machine, "here", lambda *_: None)

    def call(found: dict[str, dict[str, Any]], *arguments: str) -> Path:
        monkeypatch.setattr(full_size, "measure", lambda start, *_: iter(found[start.engine].items()))
        file = tmp_path / "record.json"
        words = ["--record", str(file), "--output", str(tmp_path), "--later", "--tp", "4", *arguments]
        monkeypatch.setattr(sys, "argv", ["bench_full", *words])
        assert full_size.main() == 0
        return file

    return call


OURS = {
    "ready after": 90.0,
    "start": {"ready after weights": 21.5, "stages": {}},
    "plugin": {},
    "at 16": served(7.25, 1700.0),
    "steady at 16": 7.0,
    "steady at 64": None,
    "prompt of 8192": served(2.5, 3.0),
}


def test_bench_full_records_ours_beside_stock(run: Any) -> None:
    file = run({"ours": OURS, "stock": {"ready after": 180.0, "at 16": served(14.5, 900.0)}}, "--flags", "--x 1")
    found = {(one.metric, one.requests, one.prompt): one for one in figures.read(file)}
    mean = found["time per output token, mean", 16, 1024]
    assert (mean.value, mean.peer_value, mean.unit, mean.output) == (7.25, 14.5, "ms", 256)
    assert (mean.case, mean.machine, mean.cards, mean.setting) == ("flash_tp4", "NVIDIA H200", 4, "--x 1")
    assert mean.source.startswith("launch/bench_full --record") and mean.peer == full_size_record.PEER
    assert float(found["output tokens per second", 16, 1024].ratio or 0) == pytest.approx(1700 / 900)
    assert found["ready after the process began", None, None].peer_value == 180
    steady = found["decode step, steady", 16, 1024]
    assert (steady.value, steady.peer_value) == (7.0, None)
    long = found["time to first token, median", 1, 8192]
    assert (long.value, long.output) == (99.0, None)
    assert len(found) == 8, "a step that was not found, and the decode of a long prompt's few tokens, are left out"


def test_other_conditions_are_recorded(run: Any) -> None:
    """They would stand in place of the usual run's figures otherwise."""
    file = run({"ours": OURS, "stock": {}}, "--flags", "--x 1", "--sampling", "top-p", "--radix-cache")
    assert {one.setting for one in figures.read(file)} == {"--x 1, top-p 0.95, radix cache"}


def test_a_record_has_the_conditions_of_the_notebooks_run(run: Any) -> None:
    """Otherwise a new run would stand beside the last one on docs/benchmarks.md instead of replacing it."""
    recorded = {one.conditions for one in figures.recorded()}
    at_1 = {"at 1": served(3.5, 250.0), "steady at 1": 3.4}
    file = run({"ours": OURS | at_1, "stock": {}}, "--tp", "2")
    new = {(one.metric, one.requests) for one in figures.read(file) if one.conditions not in recorded}
    median = "time per output token, median"
    assert new == {(median, 1), (median, 16), ("time to first token, median", 16)}


def test_figures_of_another_run_are_not_recorded(run: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"stock": {"at 16": served(14.5, 900.0)}}))
    with pytest.raises(SystemExit):
        run({"ours": OURS}, "ours")
    assert (
        "holds results of another run: model: expected 'DeepSeek-V4-Flash, random weights', found None"
        in capsys.readouterr().err
    )
    file = run({"ours": OURS}, "ours", "--fresh")
    assert not [one for one in figures.read(file) if one.peer is not None]


@pytest.mark.parametrize(
    ("servers", "file", "message"),
    [
        (["stock"], "new.json", "expected ours among the servers, found stock"),
        (["ours"], "old.json", "expected a new .json file"),
        (["ours"], "new.txt", "expected a .json file"),
        (["ours"], "gone/new.json", "in a folder that exists"),
    ],
    ids=["stock alone", "a file that exists", "no JSON", "no folder"],
)
def test_a_record_that_cannot_be_written_stops_the_run(
    servers: list[str], file: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "old.json").write_text("{}")
    monkeypatch.setattr(full_size, "measure", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(sys, "argv", ["bench_full", *servers, "--record", str(tmp_path / file)])
    with pytest.raises(SystemExit):
        full_size.main()
    assert message in capsys.readouterr().err


def test_code_version_is_the_commit() -> None:
    version = full_size_record.code_version()
    assert version is None or len(version.split(" + ")[0]) >= 7
