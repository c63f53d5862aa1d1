"""launch/bench_load and launch/bench_convert: the checkpoint that they write, and what they make of ranks' figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(ROOT / "launch"), *sys.path]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setenv("PYTHONPATH", ":".join(path))


def write_small(folder: Path, format: TinyFormat, layers: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(format, {})))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("format", [TinyFormat.NVFP4_FULL, TinyFormat.DEEPSEEK])
def test_what_is_written(format: TinyFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files, in pieces, by several processes: bit for bit what a server draws for itself."""
    from benchmarks import random_checkpoint

    monkeypatch.setattr(random_checkpoint, "write_flash", write_small)
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 10**6)
    monkeypatch.setattr(random_checkpoint, "PIECE_BYTES", 10**5)
    folder = random_checkpoint.write_random(tmp_path / "source", format, 3)
    names = {file.name for file in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "part-000.safetensors", "part-001.safetensors"} <= names
    assert "unfinished" not in names
    written, drawn = verify(folder), verify_dummy(folder)
    assert written.inventory.entries.keys() == drawn.inventory.entries.keys()
    reader, expected = written.reader(), drawn.reader()
    for name in written.inventory.entries:
        found, wanted = (one.read(name).contiguous().reshape(-1).view(torch.uint8) for one in (reader, expected))
        assert torch.equal(found, wanted), name
    reader.finish()


def test_the_verdict_is_of_the_worst_rank() -> None:
    from benchmarks.load import Run, table, verdict
    from benchmarks.process_memory import Peak

    def run(seconds: float, own: float, resident: float = 0) -> Run:
        said: list[dict[str, Any]] = [
            {
                "device": "GPU",
                "bytes": 12_000_000_000,
                "seconds": taken,
                "waited for files": 1.0,
                "allocated before": 500_000_000,
                "pinned": 500_000_000,
            }
            for taken in (4.0, seconds)
        ]
        peaks = [Peak(9, int(1e9), 0), Peak(9, int(own), int(resident))]
        return Run([5 * 10**9, 4 * 10**9, 15 * 10**9], 1, said, peaks)

    good, words = verdict(run(5.0, 17e9))
    assert good and words.startswith("pass: 24.0 GB, 2 rank(s): 2.40 GB/s a rank (goal 2), 17.50 GB allocated, 0.50")
    assert not verdict(run(6.1, 17e9))[0] and not verdict(run(5.0, 17.6e9))[0]
    assert verdict(run(5.0, 17.6e9))[1].startswith("FAIL")
    assert not verdict(run(5.0, 0, 17.6e9))[0], "no zero where the system does not say what is allocated"
    assert table([run(5.0, 17e9)])[-1] == "| GPU | 2 | 1 | 1 | 12.00 | 5.00 | 1.00 | 2.40 | 17.50 |"


def test_from_writing_to_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU, a rank and then two; every rank takes its share, and what was written is removed."""
    from benchmarks import load, random_checkpoint

    monkeypatch.setattr(random_checkpoint, "write_flash", write_small)
    monkeypatch.setattr(load, "LEAST_RATE", 1.0)
    monkeypatch.setattr(load, "MOST_ALLOCATED", 1e6)
    monkeypatch.setattr(sys, "argv", ["load", str(tmp_path), "--tp", "1", "2", "--device", "cpu"])
    assert load.main() == 0
    lines = capsys.readouterr().out.splitlines()
    ranks = [json.loads(line) for line in lines if line.startswith("{")]
    assert [(found["ranks"], found["rank"]) for found in ranks] == [(1, 0), (2, 0), (2, 1)]
    whole, *halves = (found["bytes"] for found in ranks)
    assert halves[0] == halves[1] and whole / 2 < halves[0] < whole
    assert lines[-2].startswith("pass: ") and lines[-1].startswith("pass: ") and "2 rank(s)" in lines[-1]
    assert not (tmp_path / "source").exists() and not list(tmp_path.glob(".source*"))


@pytest.mark.parametrize("files", [["config.json", "thesis.txt"], ["thesis.txt"]])
def test_folders_of_others_are_left_alone(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With or without a checkpoint in them, and before anything is measured."""
    from benchmarks import convert, load

    for name in ("source", "result"):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("mine")
    for main, given in ((load.main, ["--device", "cpu"]), (convert.main, [])):
        monkeypatch.setattr(sys, "argv", ["bench", str(tmp_path), *given])
        with pytest.raises(SystemExit, match="source: expected no such folder, or one made here"):
            main()
    found = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file())
    assert found == sorted(f"{folder}/{file}" for folder in ("result", "source") for file in files)


def test_nothing_is_written_where_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import load

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(sys, "argv", ["load", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match="expected a GPU, found none"):
        load.main()
    assert not (tmp_path / "new").exists()


def test_memory_of_commands(tmp_path: Path) -> None:
    """Of several at once, each with its own environment; one that fails is named."""
    from benchmarks.process_memory import measured

    module = tmp_path / "takes_memory.py"
    module.write_text("import os, sys, time\nheld = bytearray(int(os.environ['BYTES']))\ntime.sleep(1)\n")
    environments = [{"BYTES": str(size * 10**6), "PYTHONPATH": str(tmp_path)} for size in (40, 120)]
    commands = {tmp_path / f"{place}.log": ["takes_memory"] for place in range(2)}
    few, many = measured(commands, environments)
    assert 40e6 < few.own < 100e6 < 120e6 < many.own < 180e6
    assert few.resident > few.own and 1 <= few.seconds < 30
    with pytest.raises(SystemExit, match="ended with 1: see .*0.log"):
        measured({tmp_path / "0.log": ["no_such_module_here"]})
