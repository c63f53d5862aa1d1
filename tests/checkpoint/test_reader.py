"""What the reader hands out is what the files hold, whole or in parts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from tests.support.damage import change_tensor, copy_checkpoint, load_stored, set_byte, store
from tests.support.dequantize import dequantize_checkpoint, raw_tensors
from tests.support.matrices import values_of


def open_reader(directory: Path) -> CheckpointReader:
    inventory = Inventory.open(directory)
    inventory.verify(ModelConfig.from_dir(directory))
    return CheckpointReader(inventory)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("format", ["nvfp4-full", "nvfp4-experts", "bf16"])
def test_every_tensor_is_bit_identical_to_the_file(tiny: dict[str, Path], format: str) -> None:
    reader = open_reader(tiny[format])
    names = {
        "U8": torch.uint8,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "I64": torch.int64,
    }
    for name, (dtype, array) in raw_tensors(tiny[format]).items():
        if name.startswith("mtp."):
            continue
        tensor = reader.read(name)
        assert tensor.dtype is names[dtype] and tuple(tensor.shape) == array.shape, name
        assert as_bytes(tensor) == array.tobytes(), name
    reader.finish()


@pytest.mark.parametrize("format", ["nvfp4-full", "nvfp4-experts", "bf16"])
def test_matrices_dequantise_to_the_independent_values(tiny: dict[str, Path], format: str) -> None:
    reader = open_reader(tiny[format])
    expected = dequantize_checkpoint(tiny[format])
    seen = set()
    for name, values in expected.items():
        stem = name.removesuffix(".weight")
        storage = reader.storage(stem) if stem != name else Storage.PLAIN
        seen.add(storage)
        found = reader.read(name) if storage is Storage.PLAIN else values_of(reader.read_matrix(stem))
        assert np.array_equal(found.to(torch.float64).numpy(), values.astype(np.float64)), name
    assert len(seen) == {"nvfp4-full": 2, "nvfp4-experts": 3, "bf16": 1}[format]


RANGES = [(slice(0, 64), None), (slice(64, 128), None), (slice(3, 4), slice(16, 48)), (None, slice(64, 128))]


@pytest.mark.parametrize(("rows", "cols"), RANGES)
def test_parts_of_an_nvfp4_matrix(tiny: dict[str, Path], rows: slice | None, cols: slice | None) -> None:
    directory = tiny["nvfp4-full"]
    stem = "layers.3.ffn.experts.1.w3"
    values = dequantize_checkpoint(directory)[f"{stem}.weight"]
    raw = raw_tensors(directory)
    part = open_reader(directory).read_matrix(stem, rows, cols)
    r, c = rows or slice(None), cols or slice(0, values.shape[1])
    assert isinstance(part, NvFp4Tensor)
    assert np.array_equal(part.dequantize().numpy(), values[r, c])
    assert as_bytes(part.packed) == raw[f"{stem}.weight"][1][r, c.start // 2 : c.stop // 2].tobytes()
    assert as_bytes(part.block_scale) == raw[f"{stem}.weight_scale"][1][r, c.start // 16 : c.stop // 16].tobytes()
    assert as_bytes(part.global_scale) == raw[f"{stem}.weight_scale_2"][1].tobytes()


@pytest.mark.parametrize(("rows", "cols"), [*RANGES, (slice(100, 300), slice(1, 250)), (slice(127, 129), None)])
def test_parts_of_an_fp8_matrix(tiny: dict[str, Path], rows: slice | None, cols: slice | None) -> None:
    stem = "layers.2.attn.wkv"
    values = dequantize_checkpoint(tiny["nvfp4-experts"])[f"{stem}.weight"]
    part = open_reader(tiny["nvfp4-experts"]).read_matrix(stem, rows, cols)
    assert np.array_equal(values_of(part).numpy(), values[rows or slice(None), cols or slice(None)])


PARTS = [(None, None), (slice(0, 64), None), (slice(100, 300), slice(32, 192)), (slice(127, 129), slice(96, None))]


@pytest.mark.parametrize(("rows", "cols"), PARTS)
def test_parts_of_an_fp8_matrix_in_mxfp8(tiny: dict[str, Path], rows: slice | None, cols: slice | None) -> None:
    """The codes are the file's, the scale of a block of 128 by 128 is that of each 32 in each of its rows."""
    directory, stem = tiny["nvfp4-experts"], "layers.2.attn.wkv"
    part = open_reader(directory).read_mxfp8(stem, rows, cols)
    r, c, raw = rows or slice(None), cols or slice(None), raw_tensors(directory)
    assert np.array_equal(part.dequantize().numpy(), dequantize_checkpoint(directory)[f"{stem}.weight"][r, c])
    codes = raw[f"{stem}.weight"][1]
    assert as_bytes(part.codes) == codes[r, c].tobytes()
    scales = raw[f"{stem}.scale"][1].repeat(128, axis=0)[: len(codes)].repeat(128, axis=1)[:, : codes.shape[1]]
    assert as_bytes(part.scale) == scales[r, c][:, ::32].tobytes()


def test_what_has_no_mxfp8_form_is_refused(tiny: dict[str, Path]) -> None:
    reader = open_reader(tiny["nvfp4-experts"])
    with pytest.raises(CheckpointError, match=r"compressor\.wkv\.weight': expected FP8 with UE8M0 scales, found plain"):
        reader.read_mxfp8("layers.1.attn.compressor.wkv")
    with pytest.raises(CheckpointError, match=r"wkv.*whole blocks of 32"):
        reader.read_mxfp8("layers.2.attn.wkv", cols=slice(16, 64))


def test_ranges_that_cut_blocks_or_leave_the_matrix_are_refused(tiny: dict[str, Path]) -> None:
    reader = open_reader(tiny["nvfp4-full"])
    stem = "layers.3.attn.wo_b"
    for cols in (slice(0, 24), slice(8, 16), slice(1, None)):
        with pytest.raises(CheckpointError, match=rf"{stem}.*whole blocks of 16"):
            reader.read_matrix(stem, cols=cols)
    for rows in (slice(0, 257), slice(5, 5), slice(-1, 3), slice(0, 4, 2)):
        with pytest.raises(CheckpointError, match=rf"{stem}\.weight' in .*rows .*not a range of the matrix's 256"):
            reader.read_matrix(stem, rows=rows)
    with pytest.raises(CheckpointError, match=r"'layers\.9\.attn\.wq_a\.weight' is missing"):
        reader.storage("layers.9.attn.wq_a")


def test_only_what_is_read_is_checked_and_the_index_is_that_of_the_file(tiny: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny["nvfp4-full"], tmp_path / "copy")
    stem = "layers.3.attn.wo_b"
    change_tensor(directory, f"{stem}.weight_scale", set_byte(16 * 77 + 9, 0xFF))
    reader = open_reader(directory)
    reader.read_matrix(stem, rows=slice(0, 64))
    reader.read_matrix(stem, cols=slice(0, 9 * 16))
    for part in ({"rows": slice(64, 128)}, {"cols": slice(9 * 16, 256)}, {}):
        with pytest.raises(CheckpointError, match=r"index \[77, 9\] \(1 such"):
            reader.read_matrix(stem, **part)


def test_fp8_values_are_checked(tiny: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny["nvfp4-experts"], tmp_path / "copy")
    change_tensor(directory, "layers.2.attn.wkv.weight", set_byte(300, 0xFF))
    change_tensor(directory, "layers.1.attn.wkv.scale", set_byte(2, 0xFF))
    reader = open_reader(directory)
    with pytest.raises(CheckpointError, match=r"layers\.2\.attn\.wkv\.weight'.*no NaN, found nan at index \[1, 44\]"):
        reader.read_matrix("layers.2.attn.wkv")
    with pytest.raises(CheckpointError, match=r"layers\.1\.attn\.wkv\.scale'.*no NaN scale.*\[1, 0\]"):
        reader.read_matrix("layers.1.attn.wkv")


def test_finish_names_what_was_never_read(tiny: dict[str, Path]) -> None:
    reader = open_reader(tiny["nvfp4-full"])
    names = [n for n in raw_tensors(tiny["nvfp4-full"]) if not n.startswith("mtp.") and not n.endswith("input_scale")]
    left = "layers.4.hc_ffn_scale"
    for name in names:
        if name != left:
            reader.read(name)
    with pytest.raises(CheckpointError, match=rf"1 tensors were never read: '{left}' in model-0000\d-of"):
        reader.finish()
    reader.read(left)
    reader.finish()


def test_reading_needs_a_verified_inventory(tiny: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"Inventory\.verify"):
        CheckpointReader(Inventory.open(tiny["bf16"]))


def test_data_need_not_be_aligned(tiny: dict[str, Path], tmp_path: Path) -> None:
    """A header of odd length shifts every tensor."""
    directory = copy_checkpoint(tiny["bf16"], tmp_path / "copy")
    for file in sorted(directory.glob("*.safetensors")):
        store(file, load_stored(file))
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        file.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    reader = open_reader(directory)
    for name, values in dequantize_checkpoint(tiny["bf16"]).items():
        assert np.array_equal(reader.read(name).double().numpy(), values.astype(np.float64)), name


def test_writing_to_a_tensor_never_reaches_the_file(tiny: dict[str, Path], tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(tiny["nvfp4-full"], directory)
    before = raw_tensors(directory)
    reader = open_reader(directory)
    for name in before:
        if not name.startswith("mtp."):
            reader.read(name).view(-1).view(torch.uint8).fill_(1)
    after = raw_tensors(directory)
    assert all(np.array_equal(before[name][1], after[name][1], equal_nan=False) for name in before)
