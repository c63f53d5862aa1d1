"""``nvfp4-sgl verify``: figures are NumPy's, every difference is found and named, and exact casts are proved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint import checksums
from nvfp4_sgl.checkpoint.findings import Finding
from nvfp4_sgl.checkpoint.names import tensor_specs
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.reports import compare as compare_module
from nvfp4_sgl.reports.compare import compare, is_lossless
from nvfp4_sgl.reports.inspection import finding_lines
from nvfp4_sgl.reports.thresholds import MAX_BLOCK, MAX_RMS, Thresholds
from nvfp4_sgl.reports.verification import verify_checkpoint
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyFormat
from tests.support.damage import (
    change_tensor,
    copy_checkpoint,
    damaged_copy,
    load_stored,
    set_byte,
    store,
)
from tests.support.dequantize import raw_tensors
from tests.support.figures import figures, values_by_name

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "vocab_size": 328,
    "q_lora_rank": 160,
    "moe_intermediate_size": 96,
}
"""Ragged blocks of 128, and 6 and 10 blocks of 16 a row."""
EXPERT, Q = "layers.2.ffn.experts.3.w1", "layers.1.attn.wq_b"
Change = Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]
Files = dict[str, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Tiny checkpoints of one seed in every format, under transformers' names, and of another seed."""
    root = tmp_path_factory.mktemp("compared")
    for format in TinyFormat:
        write_tiny(root / format.value, format, seed=5, **SIZES)
    write_tiny(root / "renamed", "bf16", seed=5, names="transformers", **SIZES)
    write_tiny(root / "other", "bf16", seed=6, **SIZES)
    write_tiny(root / "short", "bf16", seed=5, **(SIZES | {"num_hidden_layers": 2}))
    write_cast(root / "deepseek", root / "nvfp4-experts", root / "cast")
    return {directory.name: directory for directory in root.iterdir()}


def write_cast(source: Path, like: Path, target: Path) -> None:
    """``source`` with its MXFP4 experts as NVFP4: codes as they are, and the same powers of two as scales. By NumPy.

    ``like`` has the configuration for it, and the same other tensors.
    """
    copy_checkpoint(like, target)
    released = raw_tensors(source)
    for file in target.glob("*.safetensors"):
        tensors = load_stored(file)
        for name in [name for name in tensors if name.endswith(".weight_scale") and ".experts." in name]:
            stem = name.removesuffix(".weight_scale")
            exponent = released[f"{stem}.scale"][1].astype(int) - 127
            top = int(exponent.max()) - 8
            relative = np.repeat(exponent - top, 2, axis=1)
            scale = np.where(relative >= -6, (relative + 7) << 3, 1 << np.clip(relative + 9, 0, 2))
            assert relative.min() >= -9
            tensors[name] = "F8_E4M3", list(scale.shape), scale.astype(np.uint8).tobytes()
            tensors[f"{stem}.weight_scale_2"] = "F32", [], np.float32(2.0**top).tobytes()
            codes = released[f"{stem}.weight"][1]
            tensors[f"{stem}.weight"] = "U8", list(codes.shape), codes.tobytes()
        store(file, tensors)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """Status and JSON of ``nvfp4-sgl verify``."""
    status = cli.main(["verify", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def matrices(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {matrix["name"]: matrix for matrix in report["comparison"]["matrices"]}


def problems(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(problem["kind"], problem["tensor"]) for problem in report["problems"]]


# --- figures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "source"),
    [
        ("nvfp4-full", "bf16"),
        ("nvfp4-full", "renamed"),
        ("nvfp4-full", "deepseek-base"),
        ("nvfp4-experts", "compressed-tensors"),
        ("deepseek", "renamed"),
        ("bf16", "nvfp4-full"),
        ("nvfp4-full", "other"),
    ],
)
def test_figures_are_those_of_numpy(ours: str, source: str, files: Files, capsys: Any) -> None:
    _, report = run(capsys, files[ours], "--against", files[source])
    a, b, found = values_by_name(files[ours]), values_by_name(files[source]), matrices(report)
    specs = tensor_specs(verify(files[ours]).config)
    assert list(found) == [name for name, spec in specs.items() if spec.role.is_matrix]
    for stem, matrix in found.items():
        expected = figures(a[f"{stem}.weight"], b[f"{stem}.weight"])
        assert matrix["blocks"] == expected.blocks
        close = pytest.approx((expected.rms, expected.cosine, expected.worst), rel=1e-5, abs=1e-6)
        assert (matrix["rms"], matrix["cosine"], matrix["worst"]["error"]) == close, stem
        if "compressed-tensors" not in (ours, source):
            assert matrix["equal_blocks"] == expected.equal
        if expected.worst < 1e-6:  # NumPy divides by a scale that the package takes the reciprocal of
            continue
        row, column = matrix["worst"]["row"], matrix["worst"]["column"]
        block = (row, slice(column, column + 16))
        error = np.abs(a[f"{stem}.weight"][block] - b[f"{stem}.weight"][block]).max()
        largest = max(np.abs(b[f"{stem}.weight"][block]).max(), np.abs(b[f"{stem}.weight"]).max() / 16384)
        assert error / largest == pytest.approx(expected.worst, rel=1e-5)
    others = [name for name, spec in specs.items() if not spec.role.is_matrix]
    equal = sum(np.array_equal(a[name], b[name]) for name in others)
    assert report["comparison"]["tensors"] == {"compared": len(others), "equal": equal}


BOUNDS = {
    # what is stored, and the relative RMS error of a matrix of tiny weights that it explains
    "plain": (0, 0),
    "NVFP4": (0.090, 0.100),
    "NVFP4, compressed-tensors": (0.090, 0.100),
    "MXFP4": (0.110, 0.140),
    "FP8": (0.024, 0.029),
    "FP8, float scales": (0.020, 0.029),
}


@pytest.mark.parametrize("format", [format.value for format in TinyFormat])
def test_every_format_is_as_far_from_its_source_as_quantisation_explains(
    format: str, files: Files, capsys: Any
) -> None:
    status, report = run(capsys, files[format], "--against", files["bf16"])
    for matrix in report["comparison"]["matrices"]:
        low, high = BOUNDS[matrix["storage"]]
        assert low <= matrix["rms"] <= high, matrix
    assert report["comparison"]["tensors"]["equal"] == report["comparison"]["tensors"]["compared"]
    # MXFP4 of a source in BF16 is beyond NVFP4's bounds; beside experts in NVFP4 the draft's are in MXFP4.
    wrong = {"deepseek": {"layers", "mtp"}, "nvfp4-experts": {"mtp"}}.get(format, set())
    assert {tensor.split(".")[0] for _, tensor in problems(report)} == wrong and status == bool(wrong)
    for row in report["comparison"]["classes"]:
        same = [
            matrix
            for matrix in report["comparison"]["matrices"]
            if all(matrix[key] == row[key] for key in ("class", "storage", "source_storage"))
        ]
        assert row["matrices"] == len(same) > 0
        assert row["rms_median"] == pytest.approx(float(np.median([matrix["rms"] for matrix in same])))
        assert row["rms_max"] == max(matrix["rms"] for matrix in same)
        assert row["cosine_min"] == min(matrix["cosine"] for matrix in same)
        assert row["worst_block"] == max(matrix["worst"]["error"] for matrix in same)
        assert row["equal"] == sum(matrix["equal_blocks"] == matrix["blocks"] for matrix in same)


def test_bounds_apply(files: Files, capsys: Any) -> None:
    arguments = (files["nvfp4-full"], "--against", files["bf16"])
    status, report = run(capsys, *arguments, "--max-rms", "0.0945")
    beyond = {name for name, matrix in matrices(report).items() if matrix["rms"] > 0.0945}
    assert status == 1 and {tensor for _, tensor in problems(report)} == beyond and len(beyond) > 0
    assert "relative RMS error" in report["problems"][0]["message"]
    status, report = run(capsys, *arguments, "--max-block", "0.17")
    beyond = {name for name, matrix in matrices(report).items() if matrix["worst"]["error"] > 0.17}
    assert status == 1 and {tensor for _, tensor in problems(report)} == beyond and len(beyond) > 0
    assert (report["comparison"]["max_rms"], report["comparison"]["max_block"]) == (MAX_RMS, 0.17)
    assert run(capsys, files["deepseek"], "--against", files["bf16"], "--max-rms", "0.15", "--max-block", "1")[0] == 0
    for wrong in ("-1", "nan", "inf", "x"):
        with pytest.raises(SystemExit):
            cli.main(["verify", str(files["bf16"]), "--max-rms", wrong])


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        # One of 1,536 block scales halved: that block is off by half, the matrix by hardly more than before.
        ("weight_scale", lambda d, s, data: set_byte(5, data[5] - 8)(d, s, data), "block"),
        # A global scale 9 % too large: no block is off by 0.4, the matrix by little more than the threshold of 0.12.
        ("weight_scale_2", lambda *stored: scaled(1.09)(*stored), "relative RMS error 0.1"),
    ],
)
def test_mistakes_between_quantisation_and_the_default_thresholds(
    suffix: str, change: Change, said: str, files: Files, tmp_path: Path, capsys: Any
) -> None:
    """Each is seen by one threshold alone, at its default value; an undamaged copy passes both."""
    directory = copy_checkpoint(files["nvfp4-full"], tmp_path / "copy")
    assert run(capsys, directory, "--against", files["bf16"])[0] == 0
    change_tensor(directory, f"{EXPERT}.{suffix}", change)
    status, report = run(capsys, directory, "--against", files["bf16"])
    assert status == 1 and [tensor for _, tensor in problems(report)] == [EXPERT]
    assert said in report["problems"][0]["message"]


def test_chunks_do_not_matter(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, source = verify(files["nvfp4-experts"]), verify(files["bf16"])
    once = compare(ours, source, threads=1)
    monkeypatch.setattr(compare_module, "CHUNK_VALUES", 1000)
    again = compare(ours, source, threads=3)
    for a, b in zip(once.matrices, again.matrices, strict=True):
        assert (a.stem, a.equal_blocks, a.worst, a.blocks) == (b.stem, b.equal_blocks, b.worst, b.blocks)
        assert a.rms == pytest.approx(b.rms, rel=1e-12) and a.cosine == pytest.approx(b.cosine, rel=1e-12)
    assert (once.tensors, once.equal_tensors) == (again.tensors, again.equal_tensors)


# --- without loss -------------------------------------------------------------------------------------------------


def test_an_exact_cast_is_proved(files: Files, capsys: Any) -> None:
    status, report = run(capsys, files["cast"], "--against", files["deepseek"])
    assert status == 0 and report["verdict"] == "right" and report["problems"] == []
    for matrix in report["comparison"]["matrices"]:
        assert matrix["lossless"] and matrix["equal_blocks"] == matrix["blocks"]
        assert matrix["rms"] == 0 and matrix["cosine"] == pytest.approx(1, abs=1e-12)
    assert cli.main(["verify", str(files["cast"]), "--against", str(files["deepseek"])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{files['cast']}: right, and every value is that of {files['deepseek']}"
    assert all(len(line) <= 80 for line in lines[:10])


def zero_first_block(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
    """Codes ±0 in the first block of 32."""
    return dtype, shape, b"\x80" * 16 + data[16:]


def test_an_exact_cast_needs_no_decoding(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a block of zeros under another scale; other codes or scales do."""
    decoded: list[str] = []
    read_values = CheckpointReader.read_values

    def note(reader: CheckpointReader, stem: str, rows: slice) -> Any:
        decoded.append(stem)
        return read_values(reader, stem, rows)

    monkeypatch.setattr(CheckpointReader, "read_values", note)
    zeros = [copy_checkpoint(files[name], tmp_path / name) for name in ("cast", "deepseek")]
    for directory in zeros:
        change_tensor(directory, f"{EXPERT}.weight", zero_first_block)
    change_tensor(zeros[1], f"{EXPERT}.scale", set_byte(0, 77))
    for ours, source in ((files["cast"], files["deepseek"]), zeros):
        result = compare(verify(ours), verify(source), threads=1)
        assert not result.problems and all(matrix.is_equal and matrix.lossless for matrix in result.matrices)
        assert not any(".ffn.experts." in stem for stem in decoded)
    change_tensor(zeros[1], f"{EXPERT}.scale", set_byte(1, 77))
    assert [problem.tensor for problem in compare(verify(zeros[0]), verify(zeros[1])).problems] == [EXPERT]
    assert EXPERT in decoded


def flip(place: int, bits: int) -> Change:
    return lambda dtype, shape, data: set_byte(place, data[place] ^ bits)(dtype, shape, data)


def swap_rows(first: int, second: int) -> Change:
    def change(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
        rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1).copy()
        rows[[first, second]] = rows[[second, first]]
        return dtype, shape, rows.tobytes()

    return change


def scaled(factor: float) -> Change:
    return lambda dtype, shape, data: (dtype, shape, (np.frombuffer(data, "<f4") * np.float32(factor)).tobytes())


@pytest.mark.parametrize(
    ("suffix", "change", "said"),
    [
        ("weight", flip(8 * 16 * 5 + 8 + 3, 0x01), "1 of 1536 blocks differ, the first at row 5, column 16"),
        ("weight", flip(8 * 16 * 95 + 127, 0x10), "1 of 1536 blocks differ, the first at row 95, column 240"),
        ("weight", swap_rows(3, 70), "32 of 1536 blocks differ, the first at row 3, column 0"),
        ("weight_scale", flip(16 * 4 + 1, 0x01), "1 of 1536 blocks differ, the first at row 4, column 16"),
        ("weight_scale_2", scaled(2.0), "blocks differ, the first at row 0, column 0"),
        ("weight_scale_2", scaled(1 + 2**-22), "blocks differ, the first at row 0, column 0"),
    ],
)
@pytest.mark.parametrize(("ours", "source"), [("cast", "deepseek"), ("nvfp4-full", "nvfp4-full")])
def test_a_cast_with_one_thing_changed_is_not(
    ours: str, source: str, suffix: str, change: Change, said: str, files: Files, tmp_path: Path, capsys: Any
) -> None:
    directory = copy_checkpoint(files[ours], tmp_path / "copy")
    change_tensor(directory, f"{EXPERT}.{suffix}", change)
    status, report = run(capsys, directory, "--against", files[source])
    assert status == 1 and problems(report) == [("differs", EXPERT)]
    blocks = matrices(report)[EXPERT]
    assert said in report["problems"][0]["message"]
    a, b = values_by_name(directory)[f"{EXPERT}.weight"], values_by_name(files[source])[f"{EXPERT}.weight"]
    assert blocks["equal_blocks"] == figures(a, b).equal < blocks["blocks"]
    assert report["problems"][0]["message"] == blocks["problem"]
    alone, _ = run(capsys, directory)
    assert alone == 0  # by itself it is a good checkpoint
    if suffix == "weight":
        assert (
            run(capsys, directory, "--against", files[source], "--lossy", "--max-rms", "2", "--max-block", "999")[0]
            == 0
        )


def test_nvfp4_under_another_name_is_the_same(files: Files, tmp_path: Path, capsys: Any) -> None:
    """compressed-tensors stores 1 / scale: values may differ by its rounding, and by nothing else."""
    for ours, source in (("compressed-tensors", "nvfp4-experts"), ("nvfp4-experts", "compressed-tensors")):
        _, report = run(capsys, files[ours], "--against", files[source])
        experts = [matrix for matrix in report["comparison"]["matrices"] if matrix["class"] == "experts"]
        assert len(experts) == 72 and all(m["lossless"] and m["equal_blocks"] == m["blocks"] for m in experts)
        assert all(matrix["rms"] < 2e-7 for matrix in experts) and any(matrix["rms"] > 0 for matrix in experts)
    directory = copy_checkpoint(files["compressed-tensors"], tmp_path / "copy")
    change_tensor(directory, f"{EXPERT}.weight_packed", flip(700, 0x10))
    _, report = run(capsys, directory, "--against", files["nvfp4-experts"])
    assert matrices(report)[EXPERT]["equal_blocks"] == matrices(report)[EXPERT]["blocks"] - 1
    assert ("differs", EXPERT) in problems(report)


def test_mxfp4_that_nvfp4_cannot_hold_may_differ(files: Files, tmp_path: Path, capsys: Any) -> None:
    """One block of the source is 2^-30 of what it was: NVFP4 has no scale for it, and rounds it to zeros."""
    source, ours = copy_checkpoint(files["deepseek"], tmp_path / "a"), copy_checkpoint(files["cast"], tmp_path / "b")
    exponent = raw_tensors(source)[f"{EXPERT}.scale"][1].flatten()[2]
    change_tensor(source, f"{EXPERT}.scale", set_byte(2, int(exponent) - 30))
    change_tensor(ours, f"{EXPERT}.weight", lambda d, shape, data: (d, shape, data[:32] + bytes(16) + data[48:]))
    status, report = run(capsys, ours, "--against", source)
    found = matrices(report)[EXPERT]
    assert status == 0 and not found["lossless"] and 0 < found["rms"] < 1e-8
    assert found["equal_blocks"] == found["blocks"] - 2


def test_what_is_without_loss() -> None:
    bf16, f32 = {"weight": "BF16"}, {"weight": "F32"}
    expected = {
        (Storage.NVFP4, Storage.MXFP4),
        (Storage.NVFP4, Storage.NVFP4),
        (Storage.NVFP4, Storage.NVFP4_COMPRESSED),
        (Storage.NVFP4_COMPRESSED, Storage.MXFP4),
        (Storage.NVFP4_COMPRESSED, Storage.NVFP4),
        (Storage.NVFP4_COMPRESSED, Storage.NVFP4_COMPRESSED),
        (Storage.MXFP4, Storage.MXFP4),
        (Storage.FP8, Storage.FP8),
        (Storage.FP8_FLOAT_SCALES, Storage.FP8),
        (Storage.FP8_FLOAT_SCALES, Storage.FP8_FLOAT_SCALES),
        (Storage.PLAIN, Storage.MXFP4),
        (Storage.PLAIN, Storage.FP8),
        (Storage.PLAIN, Storage.PLAIN),
    }
    assert {(a, b) for a in Storage for b in Storage if is_lossless(a, b, bf16, bf16)} == expected
    assert is_lossless(Storage.PLAIN, Storage.PLAIN, f32, bf16) and is_lossless(Storage.PLAIN, Storage.PLAIN, f32, f32)
    assert not is_lossless(Storage.PLAIN, Storage.PLAIN, bf16, f32)


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{Q}.weight", swap_rows(100, 1500)),
        (f"{EXPERT}.weight", swap_rows(1, 2)),
        (f"{EXPERT}.weight_scale_2", scaled(2.0)),
        (f"{EXPERT}.weight_scale_2", scaled(0.5)),
        (f"{Q}.weight_scale", lambda dtype, shape, data: set_byte(70, data[70] + 8)(dtype, shape, data)),
        (f"{EXPERT}.weight_scale", lambda dtype, shape, data: (dtype, shape, data[::-1])),
        (f"{EXPERT}.weight_scale", lambda dtype, shape, data: (dtype, shape, bytes([0x7E]) * len(data))),
        (f"{Q}.weight", lambda dtype, shape, data: (dtype, shape, bytes([b >> 4 | (b & 15) << 4 for b in data]))),
    ],
    ids=[
        "swapped rows",
        "swapped rows of an expert",
        "doubled global scale",
        "halved global scale",
        "doubled block scale",
        "reversed scales",
        "saturated scales",
        "swapped nibbles",
    ],
)
def test_damage_is_seen_beside_a_source_of_another_format(
    name: str, change: Change, files: Files, tmp_path: Path, capsys: Any
) -> None:
    directory = copy_checkpoint(files["nvfp4-full"], tmp_path / "copy")
    change_tensor(directory, name, change)
    status, report = run(capsys, directory, "--against", files["renamed"])
    assert status == 1 and problems(report) == [("differs", name.rpartition(".")[0])]


def test_tensors_that_are_not_quantised_must_be_equal(
    files: Files, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In their first value and in their last, which another chunk has."""
    monkeypatch.setattr(compare_module, "CHUNK_VALUES", 1000)
    names = ["norm.weight", "layers.1.ffn.gate.weight", "embed.weight", "layers.1.ffn.gate.tid2eid"]
    directory = copy_checkpoint(files["nvfp4-full"], tmp_path / "copy")
    for name in names:
        for place in (0, -8 if name.endswith("tid2eid") else -2):
            change_tensor(directory, name, flip(place, 0x01))
    status, report = run(capsys, directory, "--against", files["bf16"])
    assert status == 1 and sorted(problems(report)) == sorted(("differs", name) for name in names)
    assert all("2 of " in problem["message"] for problem in report["problems"])
    counts = report["comparison"]["tensors"]
    assert counts["equal"] == counts["compared"] - len(names)


def test_a_wider_dtype_is_no_difference(files: Files, tmp_path: Path, capsys: Any) -> None:
    def widened(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
        return "F32", shape, (np.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()

    directory = copy_checkpoint(files["bf16"], tmp_path / "copy")
    for name in ("norm.weight", f"{Q}.weight"):
        change_tensor(directory, name, widened)
    status, report = run(capsys, directory, "--against", files["bf16"])
    assert status == 0 and matrices(report)[Q]["lossless"]
    change_tensor(directory, f"{Q}.weight", set_byte(0, 1))
    assert run(capsys, directory, "--against", files["bf16"])[0] == 1


def test_bad_values_are_told_once(files: Files, tmp_path: Path, capsys: Any) -> None:
    directory = copy_checkpoint(files["nvfp4-full"], tmp_path / "copy")
    change_tensor(directory, f"{EXPERT}.weight_scale", set_byte(37, 0x7F))
    status, report = run(capsys, directory, "--against", files["bf16"])
    assert status == 1 and problems(report) == [("value", f"{EXPERT}.weight_scale")]
    assert EXPERT not in matrices(report)
    status, report = run(capsys, files["nvfp4-full"], "--against", directory)
    assert (
        status == 1
        and [kind for kind, _ in problems(report)] == ["value"]
        and str(directory) in str(report["problems"])
    )


@pytest.mark.parametrize("damage", ["missing tensor", "missing norm", "extra tensor", "truncated file"])
def test_a_broken_structure_is_wrong(damage: str, files: Files, tmp_path: Path, capsys: Any) -> None:
    whole = write_whole(tmp_path / "whole")
    directory = damaged_copy(whole, tmp_path / "copy", damage)
    for arguments in ((directory,), (directory, "--against", whole, "--html", tmp_path / "report.html")):
        status, report = run(capsys, *arguments)
        assert status == 1 and report["verdict"] == "wrong" and problems(report) == [("structure", None)]
        assert report["inspection"] is None and report["comparison"] is None
    assert "WRONG" in (tmp_path / "report.html").read_text()
    assert cli.main(["verify", str(whole), "--against", str(directory)]) == 2  # nothing is said of DST
    assert str(directory) in capsys.readouterr().err


def write_whole(directory: Path) -> Path:
    write_tiny(directory, "nvfp4-full", seed=3)
    return directory


def test_layers_that_one_of_them_has_are_named(files: Files, capsys: Any) -> None:
    for ours, source, kind in (("short", "bf16", "missing"), ("bf16", "short", "extra")):
        status, report = run(capsys, files[ours], "--against", files[source])
        longer, shorter = (tensor_specs(verify(files[name]).config) for name in ("bf16", "short"))
        names = [spec.key for name, spec in longer.items() if name not in shorter]
        assert status == 1 and report["comparison"][kind] == names and problems(report) == [(kind, n) for n in names]


def test_other_shapes_are_named(files: Files, tmp_path: Path, capsys: Any) -> None:
    write_tiny(tmp_path / "wide", "bf16", seed=5, **(SIZES | {"moe_intermediate_size": 128}))
    status, report = run(capsys, tmp_path / "wide", "--against", files["bf16"])
    assert status == 1 and {kind for kind, _ in problems(report)} == {"shape"}
    assert len(report["problems"]) == (3 + 1) * (8 + 1) * 3  # of layers and of the draft
    assert "has the shape [128, 256], in the source [96, 256]" in report["problems"][0]["message"]


# --- drafts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """As DeepSeek releases them, with a draft of each kind."""
    root = tmp_path_factory.mktemp("released")
    for draft in ("mtp", "dspark"):
        write_tiny(root / draft, "deepseek", seed=5, draft=draft, **SIZES)
    return {directory.name: directory for directory in root.iterdir()}


def other_value(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
    """The lowest bit of a byte in the middle flipped."""
    return flip(len(data) // 2, 0x01)(dtype, shape, data)


CHANGED = {
    "mtp": ("mtp.0.h_proj.weight", "mtp.0.ffn.experts.3.w1.weight", "mtp.0.attn.wq_b.scale", "mtp.0.enorm.weight"),
    "dspark": ("mtp.0.main_proj.weight", "mtp.1.ffn.experts.7.w2.weight", "mtp.2.markov_head.markov_w1.weight"),
}


@pytest.mark.parametrize("draft", CHANGED)
def test_what_has_changed_in_a_draft_is_named(draft: str, releases: Files, tmp_path: Path, capsys: Any) -> None:
    """In a conversion that keeps the draft's bytes; one bit of one tensor."""
    converted = tmp_path / "converted"
    assert cli.main(["convert", str(releases[draft]), str(converted)]) == 0
    capsys.readouterr()
    status, report = run(capsys, converted, "--against", releases[draft])
    found = report["comparison"]["draft"]
    assert status == 0 and found["equal_matrices"] == found["matrices"] > 20 and found["rms_max"] == 0
    assert found["tensors"]["equal"] == found["tensors"]["compared"] > 10
    (converted / checksums.FILE).unlink()
    for name in CHANGED[draft]:
        damaged = copy_checkpoint(converted, tmp_path / name)
        change_tensor(damaged, name, other_value)
        status, report = run(capsys, damaged, "--against", releases[draft])
        stem = name.removesuffix(".weight").removesuffix(".scale")
        assert status == 1 and [tensor for _, tensor in problems(report)] in ([stem], [name]), report["problems"]


def test_a_draft_in_nvfp4_is_within_bounds(releases: Files, tmp_path: Path, capsys: Any) -> None:
    """Its experts are exact, FP8 is rounded; another source's draft is neither."""
    converted = tmp_path / "converted"
    assert cli.main(["convert", str(releases["mtp"]), str(converted), "--drafts", "nvfp4"]) == 0
    capsys.readouterr()
    status, report = run(capsys, converted, "--against", releases["mtp"])
    found = report["comparison"]["draft"]
    assert status == 0 and found["matrices"] > found["equal_matrices"] >= 8 * 3 and 0.05 < found["rms_max"] < MAX_RMS
    assert cli.main(["verify", str(converted), "--against", str(releases["mtp"])]) == 0
    others = found["tensors"]["compared"]
    line = f"draft: {found['equal_matrices']} of {found['matrices']} matrices and {others} of {others} others equal"
    assert line in capsys.readouterr().out.splitlines()
    _, report = run(capsys, converted, "--against", releases["dspark"])
    assert "mtp.0.main_proj.weight" in report["comparison"]["draft"]["missing"]
    assert "mtp.0.e_proj.weight" in report["comparison"]["draft"]["extra"]


def test_a_draft_that_one_of_them_has_is_not_compared(files: Files, capsys: Any) -> None:
    pair = files["nvfp4-experts"], files["compressed-tensors"]
    for ours, source in (pair, pair[::-1]):
        found = run(capsys, ours, "--against", source)[1]["comparison"]
        assert found["draft"] is None and found["undrafted"] == str(pair[1])
        cli.main(["verify", str(ours), "--against", str(source)])
        said = capsys.readouterr().out.splitlines()
        assert f"draft: not compared, since {pair[1]} has none" in said
        assert "every value is that of" not in said[-1]


# --- reports ------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects what a browser would fetch or run, and the ids of figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.figures: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Iterable[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag in ("script", "link", "img", "iframe") or {"src", "href", "onload"} & found.keys():
            self.fetched.append(tag)
        if tag == "figure":
            self.figures.append(found["id"] or "")


def svgs(text: str) -> list[ElementTree.Element]:
    parts = text.split("<svg")[1:]
    return [ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>") for part in parts]


def test_the_page_stands_alone_and_shows_every_layer(files: Files, tmp_path: Path, capsys: Any) -> None:
    directory = tmp_path / "<b>copy & co"
    shutil.copytree(files["nvfp4-full"], directory)
    change_tensor(directory, f"{EXPERT}.weight_scale_2", scaled(2.0))
    file = tmp_path / "report.html"
    assert cli.main(["verify", str(directory), "--against", str(files["bf16"]), "--html", str(file)]) == 1
    capsys.readouterr()
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    assert page.fetched == [] and "http" not in text and "<b>" not in text and "&lt;b&gt;copy &amp; co" in text
    classes = ["experts", "shared", "q", "kv", "o_a", "o_b", "compressor", "indexer"]
    assert page.figures == [f"{what}-{name}" for what in ("rms", "block") for name in classes]
    report = verify_checkpoint(directory, files["bf16"])
    assert report.comparison is not None
    for name, drawing in zip(classes, svgs(text), strict=False):
        layers = {matrix.layer for matrix in report.comparison.matrices if matrix.matrix_class.value == name}
        circles = drawing.findall(".//circle")
        assert [title.text.split(":")[0] for title in drawing.findall(".//title")] == [
            f"layer {n}" for n in sorted(layers)
        ]
        heights = [float(circle.attrib["cy"]) for circle in circles]
        assert all(0 <= height <= float(drawing.attrib["height"]) for height in heights)
    assert EXPERT in text and "WRONG, 1 problem" in text


def test_findings_are_listed_up_to_a_number_and_escaped(files: Files, capsys: Any) -> None:
    assert cli.main(["verify", str(files["nvfp4-full"]), "--against", str(files["other"])]) == 1
    lines = capsys.readouterr().out.splitlines()
    listed = [line for line in lines if line.startswith("problem: ")]
    assert len(listed) == 20 and lines[-2].startswith("and ") and lines[-2].endswith(" more problems")
    assert int(lines[-2].split()[1]) + 20 == int(lines[-1].split()[-2]) > 81
    assert finding_lines([Finding("a\x1b[2J", "x", "y")], []) == ["problem: a\\x1b[2J: y"]


def test_thresholds_are_what_the_page_says() -> None:
    assert Thresholds() == Thresholds(MAX_RMS, MAX_BLOCK, False) == Thresholds(0.12, 0.4)


def test_a_page_that_cannot_be_written_is_told_before_anything_is_read(
    files: Files, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "absent" / "report.html"
    read = "nvfp4_sgl.reports.verification.verify_checkpoint"
    monkeypatch.setattr(read, lambda *_, **__: pytest.fail("it was read"))
    assert cli.main(["verify", str(files["nvfp4-full"]), "--html", str(page)]) == 2
    assert str(page) in capsys.readouterr().err
