"""``nvfp4-sgl inspect``: every bad value is found and named, ranges are those of the files, and what passes loads."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_sgl import cli, doctor
from nvfp4_sgl.checkpoint import scan as scan_module
from nvfp4_sgl.checkpoint.classes import MatrixClass
from nvfp4_sgl.checkpoint.inventory import INDEX
from nvfp4_sgl.checkpoint.names import tensor_specs
from nvfp4_sgl.checkpoint.quantization import MANIFEST
from nvfp4_sgl.checkpoint.scan import scan
from nvfp4_sgl.checkpoint.stored_files import MappedFiles, ReadFiles
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.memory.plan import ServerFlags
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyFormat
from tests.support.damage import (
    change_json,
    change_tensor,
    copy_checkpoint,
    file_of,
    load_stored,
    set_byte,
    set_float,
    store,
)
from tests.support.dequantize import E4M3, E8M0, raw_tensors

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 8}
EXPERT, Q = "layers.2.ffn.experts.3.w1", "layers.1.attn.wq_b"
Change = Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny checkpoint of three layers in every format."""
    root = tmp_path_factory.mktemp("small")
    for format in TinyFormat:
        write_tiny(root / format.value, format, seed=5, **SIZES)
    return {format.value: root / format.value for format in TinyFormat}


def inspect(directory: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    """Status and JSON of ``nvfp4-sgl inspect``."""
    status = cli.main(["inspect", str(directory), "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def whole(byte: int) -> Change:
    """Every byte of a tensor."""
    return lambda dtype, shape, data: (dtype, shape, bytes([byte]) * len(data))


def with_codes_and_a_zero_scale(directory: Path) -> None:
    change_tensor(directory, f"{Q}.weight", set_byte(8 * 5 + 3, 0x21))
    change_tensor(directory, f"{Q}.weight_scale", set_byte(5, 0))


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str, str]] = {
    # format, damage, kind, tensor
    "NaN scale": (
        "nvfp4-full",
        lambda d: change_tensor(d, f"{EXPERT}.weight_scale", set_byte(37, 0x7F)),
        "value",
        f"{EXPERT}.weight_scale",
    ),
    "negative scale": (
        "nvfp4-full",
        lambda d: change_tensor(d, f"{Q}.weight_scale", set_byte(8, 0xB0)),
        "value",
        f"{Q}.weight_scale",
    ),
    "zero scale under codes": ("nvfp4-full", with_codes_and_a_zero_scale, "zero-scale", f"{Q}.weight"),
    "scales all zero": (
        "nvfp4-full",
        lambda d: change_tensor(d, f"{EXPERT}.weight_scale", whole(0)),
        "value",
        f"{EXPERT}.weight_scale",
    ),
    "matrix of zeros": (
        "nvfp4-full",
        lambda d: change_tensor(d, f"{Q}.weight", whole(0x80)),
        "zero-matrix",
        f"{Q}.weight",
    ),
    "FP8 matrix of zeros": (
        "nvfp4-experts",
        lambda d: change_tensor(d, f"{Q}.weight", whole(0x80)),
        "zero-matrix",
        f"{Q}.weight",
    ),
    "MXFP4 matrix of zeros": (
        "deepseek",
        lambda d: change_tensor(d, f"{EXPERT}.weight", whole(0x08)),
        "zero-matrix",
        f"{EXPERT}.weight",
    ),
    "embedding of zeros": (
        "bf16",
        lambda d: change_tensor(d, "embed.weight", whole(0)),
        "zero-matrix",
        "embed.weight",
    ),
    "zero global scale": (
        "nvfp4-full",
        lambda d: change_tensor(d, f"{EXPERT}.weight_scale_2", set_float(0, 0.0)),
        "value",
        f"{EXPERT}.weight_scale_2",
    ),
    "infinite inverse global scale": (
        "compressed-tensors",
        lambda d: change_tensor(d, f"{EXPERT}.weight_global_scale", set_float(0, float("inf"))),
        "value",
        f"{EXPERT}.weight_global_scale",
    ),
    "NaN in FP8": ("deepseek", lambda d: change_tensor(d, f"{Q}.weight", set_byte(70, 0xFF)), "value", f"{Q}.weight"),
    "negative FP8 scale": (
        "deepseek-base",
        lambda d: change_tensor(d, f"{Q}.scale", set_float(1, -1.0)),
        "value",
        f"{Q}.scale",
    ),
    "NaN power scale": ("deepseek", lambda d: change_tensor(d, f"{EXPERT}.scale", set_byte(9, 255)), "value", EXPERT),
    "exponents too wide": (
        "deepseek",
        lambda d: change_tensor(d, f"{EXPERT}.scale", set_byte(9, 100)),
        "not-exact",
        EXPERT,
    ),
    "infinite bias": (
        "bf16",
        lambda d: change_tensor(d, "layers.2.attn.compressor.ape", set_float(3, float("-inf"))),
        "value",
        "layers.2.attn.compressor.ape",
    ),
    "expert id out of range": (
        "nvfp4-full",
        lambda d: change_tensor(d, "layers.1.ffn.gate.tid2eid", set_byte(8 * 13, 8)),
        "value",
        "layers.1.ffn.gate.tid2eid",
    ),
}
LOADED = (
    "zero scale under codes",
    "matrix of zeros",
    "FP8 matrix of zeros",
    "MXFP4 matrix of zeros",
    "embedding of zeros",
)
"""These are wrong, but a server cannot tell."""


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named_and_nothing_else(
    name: str, small: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    format, damage, kind, tensor = DAMAGES[name]
    directory = copy_checkpoint(small[format], tmp_path / "copy")
    damage(directory)
    status, report = inspect(directory, capsys, "--values")
    assert status == 1 and [problem["kind"] for problem in report["problems"]] == [kind]
    (problem,) = report["problems"]
    assert problem["tensor"].startswith(tensor)
    assert cli.main(["inspect", str(directory), "--values"]) == 1
    out = capsys.readouterr().out
    assert tensor in out and out.splitlines()[-1] == f"{directory}: WRONG, 1 problem"
    if name in LOADED:
        return
    with pytest.raises(CheckpointError, match=tensor.removesuffix(".weight")):
        Standalone(directory, capacity=256)


@pytest.mark.parametrize("format", [format.value for format in TinyFormat])
def test_what_passes_loads(format: str, small: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ((), ("--scales",), ("--values",)):
        status, report = inspect(small[format], capsys, *flags)
        assert status == 0 and report["problems"] == [] and report["notes"] == []
        assert report["targets"]["cpu"]["serves"]
    Standalone(small[format], capacity=256)
    assert cli.main(["inspect", str(small[format])]) == 0
    assert "--values reads the tensors" in capsys.readouterr().out.splitlines()[-1]


def test_saturated_scales_are_noted(small: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, name = copy_checkpoint(small["nvfp4-full"], tmp_path / "copy"), f"{Q}.weight_scale"
    change_tensor(directory, name, lambda dtype, shape, data: (dtype, shape, bytes([0x7E]) * 200 + data[200:]))
    before = raw_tensors(small["nvfp4-full"])[name][1]
    status, report = inspect(directory, capsys, "--scales")
    (note,) = report["notes"]
    saturated = 200 + int((before.flatten()[200:] == 0x7E).sum())
    assert status == 0 and note["kind"] == "saturated-scale" and note["tensor"] == name
    assert note["message"].startswith(f"{saturated} of {before.size} block scales are 448")


def numpy_ranges(directory: Path) -> dict[tuple[str, str], list[np.ndarray]]:
    """All scales by class and part, decoded from bytes; global scales as they multiply."""
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    for name, (dtype, array) in raw_tensors(directory).items():
        stem, _, suffix = name.rpartition(".")
        if name.startswith("mtp.") or "input" in suffix or suffix.endswith("weight") or "scale" not in suffix:
            continue
        if ".attn." not in stem and ".ffn." not in stem:
            continue
        value = {"F8_E4M3": E4M3, "F8_E8M0": E8M0}[dtype][array] if dtype.startswith("F8") else array
        if dtype == "BF16":
            value = (array.astype(np.uint32) << 16).view(np.float32)
        is_global = suffix in ("weight_scale_2", "weight_global_scale")
        if suffix == "weight_global_scale":
            value = np.float32(1) / value
        found.setdefault((class_by_hand(stem), "global" if is_global else "block"), []).append(value.flatten())
    return found


def class_by_hand(stem: str) -> str:
    """Class of a matrix, by looking at its name."""
    inner = stem.split(".", 2)[2]
    for text, name in (
        ("indexer", "indexer"),
        ("compressor", "compressor"),
        ("shared", "shared"),
        ("experts", "experts"),
    ):
        if text in inner:
            return name
    return {"wq_a": "q", "wq_b": "q", "wkv": "kv", "wo_a": "o_a", "wo_b": "o_b"}[inner.split(".")[-1]]


@pytest.mark.parametrize("format", [format.value for format in TinyFormat])
def test_ranges_are_those_of_the_files(format: str, small: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    directory = copy_checkpoint(small[format], tmp_path / "copy")
    if format == "nvfp4-full":  # a block of zeros may have a scale of zero
        change_tensor(
            directory, f"{Q}.weight", lambda dtype, shape, data: (dtype, shape, data[:8] + bytes(8) + data[16:])
        )
        change_tensor(directory, f"{Q}.weight_scale", set_byte(1, 0))
    status, report = inspect(directory, capsys, "--scales")
    expected = numpy_ranges(directory)
    assert status == 0 and report["values"]["read"] == "scales"
    found = {(row["class"], row["part"]): row for row in report["values"]["scales"]}
    assert found.keys() == expected.keys() and len(found) == len(report["values"]["scales"])
    for key, arrays in expected.items():
        values, row = np.concatenate(arrays), found[key]
        assert row["count"] == len(values) and row["zero"] == int((values == 0).sum())
        assert row["min"] == float(values[values > 0].min()) and row["max"] == float(values.max())
        is_e4m3 = key[1] == "block" and row["storage"].startswith("NVFP4")
        assert row["saturated"] == (int((values == 448).sum()) if is_e4m3 else 0)
        assert row["nan"] == row["infinite"] == row["negative"] == 0
    if format == "nvfp4-full":
        assert found["q", "block"]["zero"] == 1


def test_bad_scales_are_counted(small: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    directory = copy_checkpoint(small["nvfp4-full"], tmp_path / "copy")
    change_tensor(directory, f"{EXPERT}.weight_scale", set_byte(3, 0xFF))
    change_tensor(directory, f"{Q}.weight_scale", set_byte(3, 0x80))
    change_tensor(directory, f"{Q}.weight_scale_2", set_float(0, float("inf")))
    _, report = inspect(directory, capsys, "--scales")
    found = {(row["class"], row["part"]): row for row in report["values"]["scales"]}
    assert [found["experts", "block"][key] for key in ("nan", "negative", "infinite")] == [1, 0, 0]
    assert [found["q", "block"][key] for key in ("nan", "negative", "infinite")] == [0, 1, 0]
    assert [found["q", "global"][key] for key in ("nan", "negative", "infinite")] == [0, 0, 1]
    assert len(report["problems"]) == 3


def test_counts_and_bytes_are_those_of_the_files(small: dict[str, Path], capsys: Any) -> None:
    for format, directory in small.items():
        raw = {name: found for name, found in raw_tensors(directory).items() if not name.startswith("mtp.")}
        _, report = inspect(directory, capsys)
        assert report["tensors"] == len(raw), format
        matrices, others = report["matrices"], report["others"]
        assert sum(row["bytes"] for row in (*matrices, *others)) == report["bytes"]
        assert report["bytes"] == sum(array.nbytes for _, array in raw.values())
        by_class = {kind.value: 0 for kind in MatrixClass}
        for row in matrices:
            by_class[row["class"]] += row["matrices"]
        specs = [spec for spec in tensor_specs(verify(directory).config).values() if spec.role.is_matrix]
        assert by_class == {name: sum(class_by_hand(s.name) == name for s in specs) for name in by_class}


def test_chunks_do_not_matter(small: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = copy_checkpoint(small["nvfp4-full"], tmp_path / "copy")
    with_codes_and_a_zero_scale(directory)
    change_tensor(directory, "head.weight", set_byte(100_001, 0x7F))
    change_tensor(directory, "head.weight", set_byte(100_000, 0x80))
    verified = verify(directory)
    once = scan(verified, threads=1)
    monkeypatch.setattr(scan_module, "CHUNK_BYTES", 1000)
    assert scan(verified, threads=3) == once
    assert [problem.tensor for problem in once.problems] == sorted(
        ["head.weight", f"{Q}.weight"], key=str
    ) or once.problems


# --- what a target serves -----------------------------------------------------------------------------------------


def to_plain(directory: Path, stems: tuple[str, ...]) -> None:
    """Store matrices as random BF16, and let config.json say nothing of storages."""
    change_json(directory / "config.json", lambda config: config.pop("quantization_config"))
    (directory / MANIFEST).unlink()
    specs = tensor_specs(verify(directory).config)
    for stem in stems:
        file, (n, k) = file_of(directory, f"{stem}.weight"), specs[stem].shape
        kept = {name: stored for name, stored in load_stored(file).items() if not name.startswith(f"{stem}.")}
        random = np.random.default_rng(7).normal(size=n * k).astype("<f4").view("<u4") >> 16
        store(file, kept | {f"{stem}.weight": ("BF16", [n, k], random.astype("<u2").tobytes())})
    (directory / INDEX).unlink()


@pytest.mark.parametrize(
    ("stems", "serves"),
    [
        (("layers.1.ffn.experts.3.w1", "layers.1.ffn.experts.3.w3"), ["sm_90a"]),
        (("layers.1.ffn.experts.3.w2",), ["sm_90a"]),
        (("layers.1.ffn.experts.3.w3",), []),
        (("layers.0.ffn.shared_experts.w1",), []),
        (("layers.0.attn.wkv",), ["cpu", "sm_90a", "sm_100a"]),
    ],
)
def test_mixtures_are_refused_where_they_are_merged(
    stems: tuple[str, ...], serves: list[str], small: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    directory = copy_checkpoint(small["nvfp4-full"], tmp_path / "copy")
    to_plain(directory, stems)
    status, report = inspect(directory, capsys)
    assert [name for name, target in report["targets"].items() if target["serves"]] == serves
    assert status == (0 if serves else 1)
    assert [problem["kind"] for problem in report["problems"]] == ([] if serves else ["not-served"])
    cli.main(["inspect", str(directory)])
    assert ("complete" in capsys.readouterr().out) == bool(serves)
    told = doctor.Report(target="cpu")
    doctor.examine_checkpoint(told, directory, ServerFlags())
    if "cpu" in serves:
        assert told.problems == []
        Standalone(directory, capacity=256)
        return
    assert len(told.problems) == 1 and stems[0] in told.problems[0]
    assert stems[0] in report["targets"]["cpu"]["reason"]
    with pytest.raises(CheckpointError):
        Standalone(directory, capacity=256)


@pytest.mark.parametrize(
    ("mode", "serves"), [("w4a4", ["cpu", "sm_90a", "sm_100a"]), ("w4a16", ["cpu", "sm_90a"]), ("w8a8", [])]
)
def test_an_activation_mode_that_a_target_has_not_is_refused(
    mode: str, serves: list[str], small: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    directory = copy_checkpoint(small["nvfp4-full"], tmp_path / "copy")
    change_json(directory / "config.json", lambda config: config.update(activation_mode=mode))
    status, report = inspect(directory, capsys)
    assert [name for name, target in report["targets"].items() if target["serves"]] == serves
    assert status == (0 if serves else 1)
    told = doctor.Report(target="sm_100a")
    doctor.examine_checkpoint(told, directory, ServerFlags())
    assert any(f"activation_mode '{mode}'" in problem for problem in told.problems) == (mode != "w4a4")


def test_what_targets_do_with_storages(small: dict[str, Path], capsys: Any) -> None:
    _, report = inspect(small["deepseek"], capsys)
    targets = report["targets"]
    assert targets["sm_90a"]["runs"]["FP8"].startswith("packed")
    assert "MXFP8" in targets["sm_100a"]["runs"]["FP8"] and "packed" in targets["sm_100a"]["runs"]["MXFP4"]
    assert targets["sm_100a"]["serves"]
    _, report = inspect(small["compressed-tensors"], capsys)
    on_sm100 = report["targets"]["sm_100a"]
    assert on_sm100["runs"]["FP8, float scales"] is None and not on_sm100["serves"] and "wq_a" in on_sm100["reason"]


# --- errors and size ----------------------------------------------------------------------------------------------


def test_what_cannot_be_opened_is_json_too(small: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    directory = copy_checkpoint(small["bf16"], tmp_path / "copy")
    next(directory.glob("*.safetensors")).unlink()
    status, report = inspect(directory, capsys, "--values")
    assert status == 2 and report["directory"] == str(directory)
    assert [(p["kind"], p["tensor"]) for p in report["problems"]] == [("structure", None)]
    assert "absent" in report["problems"][0]["message"]


@pytest.mark.parametrize("format", ["nvfp4-full", "bf16"])
def test_files_that_are_read_are_those_that_are_mapped(format: str, small: dict[str, Path]) -> None:
    found, read, mapped = verify(small[format]), ReadFiles(), MappedFiles()
    for name, entry in found.inventory.entries.items():
        middle = slice(entry.shape[0] // 3, entry.shape[0] - entry.shape[0] // 4) if entry.shape else None
        for rows in (None, middle):
            left, right = (files.read(entry, rows) for files in (read, mapped))
            assert left.dtype == right.dtype and left.shape == right.shape, name
            assert left.reshape(-1).view(torch.uint8).equal(right.reshape(-1).view(torch.uint8)), (name, rows)
    assert scan(found, files=read, progress=io.StringIO()) == scan(found, progress=io.StringIO())


def test_a_file_that_is_cut_short_meanwhile_is_an_error(small: dict[str, Path], tmp_path: Path) -> None:
    """Where it was mapped, reading it would end the process."""
    folder = tmp_path / "cut"
    shutil.copytree(small["bf16"], folder)  # files of their own, no links
    found = verify(folder)
    for file in folder.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="became shorter while it was read; .*fetch the file again"):
        scan(found, files=ReadFiles(), progress=io.StringIO())


def test_progress_tells_what_is_left(small: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("nvfp4_sgl.checkpoint.progress.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("nvfp4_sgl.checkpoint.progress.PERIOD_SECONDS", 0.0)
    inspect_status = cli.main(["inspect", str(small["bf16"]), "--values"])
    lines = capsys.readouterr().err.splitlines()
    assert inspect_status == 0 and lines and lines[-1].startswith("reading: 0.0 of 0.0 GB, ")
    assert lines[-1].endswith("about 0 s left")


def large_checkpoint(source: Path, target: Path, vocabulary: int) -> Path:
    """``source`` with an embedding and a head of ``vocabulary`` rows, random."""
    copy_checkpoint(source, target)
    (target / INDEX).unlink()
    change_json(target / "config.json", lambda config: config.update(vocab_size=vocabulary))
    random = np.random.default_rng(1).integers(0x3C00, 0x3F80, size=(vocabulary, 256), dtype="<u2").tobytes()
    for file in target.glob("*.safetensors"):
        tensors = load_stored(file)
        for name in {"embed.weight", "head.weight"} & tensors.keys():
            tensors[name] = "BF16", [vocabulary, 256], random
        for name in [name for name in tensors if name.endswith("tid2eid")]:
            tensors[name] = "I64", [vocabulary, 6], bytes(8 * 6 * vocabulary)
        store(file, tensors)
    return target


def test_memory_does_not_grow_with_the_files(small: dict[str, Path], tmp_path: Path) -> None:
    directory = large_checkpoint(small["nvfp4-full"], tmp_path / "large", vocabulary=300_000)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from nvfp4_sgl.checkpoint import scan\nfrom nvfp4_sgl.reports import compare\n"
        "from nvfp4_sgl.checkpoint.verified import verify\n"
        "def status(field): return int(Path('/proc/self/status').read_text().split(field)[1].split()[0]) // 1024\n"
        "small, large = map(verify, sys.argv[1:])\n"
        "scan.scan(small, threads=2); compare.compare(small, small, threads=2)\n"
        "Path('/proc/self/clear_refs').write_text('5')  # the peak is counted from here\n"
        "before = status('VmRSS:')\n"
        "assert not scan.scan(large, threads=2).problems\n"
        "assert not compare.compare(large, large, threads=2).problems\n"
        "print(status('VmHWM:') - before)\n"
    )
    command = [sys.executable, "-c", script, str(small["nvfp4-full"]), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors")) // 2**20
    assert size > 300 and int(done.stdout) < 250, (size, done.stdout)
