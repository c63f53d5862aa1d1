"""What a GPU reads is what the CPU reads; damage is named; buffers are bounded, and not filled before they were copied.

A GPU's copies come late: here they are made when they are waited for, and not before.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.checkpoint import late_checks, progress, staged_files
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.checkpoint.safetensors_header import Entry
from nvfp4_sgl.checkpoint.staged_files import StagedFiles
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.weights.layout import expert_batches, expert_matrices
from nvfp4_sgl.weights.parallel import TensorParallel
from tests.support.damage import DAMAGES, change_tensor, copy_checkpoint, damaged_copy, set_byte
from tests.support.full import full

CPU = torch.device("cpu")
VALUES = [name for name, damage in DAMAGES.items() if damage.needs_values]


class LateCopies(StagedFiles):
    """Copies that are made when a mark behind them is waited for, as late as a device may make them."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._made = 0
        self._lock = threading.Lock()

    def _copy(self, target: Tensor, staged: Tensor) -> None:
        with self._lock:
            self._copies.append((target, staged))

    def _mark(self) -> LateMark:
        return LateMark(self, len(self._copies))

    def make(self, count: int | None = None) -> None:
        with self._lock:
            for target, staged in self._copies[self._made : count]:
                target.copy_(staged)
            self._made = max(self._made, len(self._copies) if count is None else count)


class LateMark:
    def __init__(self, files: LateCopies, count: int):
        self._files, self._count = files, count

    def synchronize(self) -> None:
        self._files.make(self._count)


def staged(verified: Verified) -> CheckpointReader:
    return CheckpointReader(verified.inventory, StagedFiles(CPU))


def required(verified: Verified) -> Iterator[str]:
    for name in verified.inventory.entries:
        if not name.startswith("mtp.") and not name.endswith("input_scale"):
            yield name


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def shrink(monkeypatch: pytest.MonkeyPatch, *, expected: int = 1 << 16, buffer: int = 1 << 14) -> None:
    """Buffers so small that a tiny checkpoint fills them again and again."""
    monkeypatch.setattr(staged_files, "EXPECTED_BYTES", expected)
    monkeypatch.setattr(staged_files, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(staged_files, "PART_BYTES", 1 << 12)
    monkeypatch.setattr(staged_files, "ADVISED_BYTES", 1 << 13)


@pytest.mark.parametrize("format", ["nvfp4-full", *full("nvfp4-experts"), "deepseek", *full("bf16")])
def test_every_tensor_is_that_of_the_file(tiny: dict[str, Path], format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, by rows and by columns; larger than a buffer, and many in one."""
    shrink(monkeypatch)
    verified = verify(tiny[format])
    ours, theirs = staged(verified), verified.reader()
    for name in required(verified):
        shape = verified.inventory.entries[name].shape
        ranges: list[tuple[slice | None, slice | None]] = [(None, None)]
        if shape:
            ranges.append((slice(shape[0] // 3, None), None))
        if len(shape) == 2 and shape[1] > 1:
            ranges.append((slice(0, max(shape[0] // 2, 1)), slice(shape[1] // 2, shape[1])))
        for rows, cols in ranges:
            found, expected = ours.read(name, rows, cols), theirs.read(name, rows, cols)
            assert found.dtype is expected.dtype and found.shape == expected.shape, name
            assert torch.equal(as_bytes(found), as_bytes(expected)), (name, rows, cols)
    assert ours.nbytes == theirs.nbytes
    ours.finish()


@pytest.mark.parametrize(("format", "ranks"), [("nvfp4-full", 1), ("nvfp4-full", 2), ("nvfp4-experts", 2)])
def test_a_decoder_that_is_read_ahead_has_the_same_weights(
    tiny: dict[str, Path], format: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With buffers that hold a batch of experts in part, and less."""
    verified, choice = verify(tiny[format]), choose("sm_90a", None)

    def state(reader: CheckpointReader) -> dict[str, Tensor]:
        parallel = TensorParallel(ranks - 1, ranks)
        context = Context(reader, verified.config, choice.boundaries, CPU, torch.bfloat16, choice.mode, parallel)
        decoder = Decoder(context)
        for name in ("embed.weight", "head.weight"):
            reader.read(name)
        reader.finish()
        return {name: tensor.clone() for name, tensor in decoder.state_dict().items()}

    expected = state(verified.reader())
    shrink(monkeypatch)
    found = state(staged(verified))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name


def test_experts_are_read_before_they_are_asked_for_and_in_their_order(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a batch consists of was expected, so that nothing of it is read when it is asked for."""
    verified = verify(tiny["nvfp4-full"])
    opened: list[tuple[str, int]] = []
    fill = staged_files._File.fill

    def note(file: staged_files._File, staged: Tensor, offset: int) -> None:
        opened.append((file.file.name, offset))
        fill(file, staged, offset)

    monkeypatch.setattr(staged_files._File, "fill", note)
    monkeypatch.setattr(staged_files, "THREADS", 1)
    monkeypatch.setattr(StagedFiles, "_fill", lambda *_: pytest.fail("something was not expected"))
    reader, asked = staged(verified), []
    for _, batch in expert_batches(
        reader, expert_matrices(verified.config, verified.config.layer(3), TensorParallel(1, 2))
    ):
        for expert in batch:
            for shard in expert.shards:
                reader.read_matrix(shard.stem, shard.rows, shard.cols)
                for part in reader.storage(shard.stem).decoder.parts:
                    if not part.optional:
                        entry = verified.inventory.entries[verified.inventory.part_name(shard.stem, part)]
                        rows = shard.rows if part.unit else None
                        asked.append((entry.file.name, staged_files._span(entry, rows)[0]))
    reader.release()
    assert len(asked) > 2 * 9 * 8 and opened == asked


def places(verified: Verified) -> Sequence[tuple[Entry, slice | None]]:
    """The largest that go into a small buffer, so that it is filled again and again."""
    entries = [verified.inventory.entries[name] for name in required(verified)]
    fitting = sorted((entry for entry in entries if entry.nbytes <= 1 << 13), key=lambda entry: -entry.nbytes)
    return [(entry, None) for entry in fitting[:120]]


@pytest.mark.parametrize("is_expected", [True, False])
def test_no_buffer_is_filled_before_its_copies_are_made(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, is_expected: bool
) -> None:
    """With copies as late as can be; all that was expected is asked for, a half of it, or nothing was."""
    shrink(monkeypatch)
    verified = verify(tiny["nvfp4-full"])
    files, mapped = LateCopies(), verified.reader()
    found: list[tuple[Entry, Tensor]] = []
    wanted = places(verified)
    for number, start in enumerate(range(0, len(wanted), 10)):
        batch = wanted[start : start + 10]
        if is_expected:
            files.expect(batch)
        found += [(entry, files.read(entry, rows)) for entry, rows in batch[:: 1 + number % 2]]
    files.make()
    for entry, tensor in found:
        assert torch.equal(as_bytes(tensor), as_bytes(mapped.read_unchecked(entry.name))), entry.name
    files.release()


def test_what_was_expected_long_ago_is_read_again(tiny: dict[str, Path]) -> None:
    """Its place in the buffer is another tensor's by then."""
    verified, files = verify(tiny["nvfp4-full"]), StagedFiles(CPU)
    one, *others = places(verified)
    for place in (one, others[0], others[1]):
        files.expect([place])
    assert torch.equal(as_bytes(files.read(*one)), as_bytes(verified.reader().read_unchecked(one[0].name)))
    files.release()


def test_staging_memory_is_bounded(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = torch.empty

    def count(*sizes: Any, **more: Any) -> Tensor:
        if "pin_memory" in more:
            taken.append(sizes[0])
        return empty(*sizes, **more)

    monkeypatch.setattr(torch, "empty", count)
    verified = verify(tiny["nvfp4-full"])
    reader = staged(verified)
    for _ in range(3):
        for _, batch in expert_batches(
            reader, expert_matrices(verified.config, verified.config.layer(3), TensorParallel())
        ):
            for expert in batch:
                reader.read_matrix(expert.down.stem)
    for name in required(verified):
        reader.read(name)
    reader.finish()
    assert sum(taken) == staged_files.STAGING_BYTES == 320 << 20


@pytest.mark.parametrize("name", VALUES)
def test_damage_is_found_and_named(tiny: dict[str, Path], tmp_path: Path, name: str) -> None:
    """As on the CPU, but at the end."""
    verified = verify(damaged_copy(tiny["nvfp4-full"], tmp_path / "damaged", name))
    reader = staged(verified)
    for tensor in required(verified):
        reader.read(tensor)
    with pytest.raises(CheckpointError) as caught:
        reader.finish()
    with pytest.raises(CheckpointError) as on_cpu:
        for tensor in required(verified):
            verified.reader().read(tensor)
    assert str(caught.value) == str(on_cpu.value)
    for mention in (*DAMAGES[name].mentions, ".safetensors"):
        assert mention in str(caught.value)


def test_the_first_that_is_damaged_is_named_at_the_place_in_the_file(tiny: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny["nvfp4-full"], tmp_path / "copy")
    stem = "layers.3.attn.wo_b"
    change_tensor(directory, f"{stem}.weight_scale", set_byte(16 * 77 + 9, 0xFF))
    change_tensor(directory, "layers.4.attn.wo_b.weight_scale", set_byte(3, 0xFF))
    reader = staged(verify(directory))
    reader.read_matrix(stem, rows=slice(0, 64))
    reader.check_read()
    reader.read_matrix(stem, cols=slice(9 * 16, 256))
    reader.read_matrix("layers.4.attn.wo_b")
    with pytest.raises(CheckpointError, match=rf"'{stem}\.weight_scale'.*index \[77, 9\] \(1 such"):
        reader.check_read()


def test_a_damaged_file_does_not_load_to_its_end(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_checks, "LOOK_AFTER", 10)
    directory = damaged_copy(tiny["nvfp4-full"], tmp_path / "damaged", "NaN block scale")
    verified = verify(directory)
    reader, names = staged(verified), list(required(verified))
    with pytest.raises(CheckpointError, match="found nan"):
        for name in names:
            reader.read(name)
    assert len(reader._unread) > len(names) // 4


@pytest.mark.parametrize("format", ["deepseek", "nvfp4-experts"])
def test_a_decoder_that_stumbles_over_damage_names_the_tensor(
    tiny: dict[str, Path], tmp_path: Path, format: str
) -> None:
    directory = copy_checkpoint(tiny[format], tmp_path / "copy")
    change_tensor(directory, "layers.2.attn.wkv.scale", set_byte(0, 0xFF))
    if format == "deepseek":
        change_tensor(directory, "layers.2.ffn.experts.0.w1.scale", set_byte(2, 0xFF))
    reader = staged(verify(directory))
    with pytest.raises(CheckpointError, match=r"layers\.2\.attn\.wkv\.scale'.*no NaN scale"):
        reader.read_mxfp8("layers.2.attn.wkv")
    if format == "deepseek":
        with pytest.raises(CheckpointError, match=r"w1\.scale'.*no NaN scale.*\[0, 2\]"):
            reader.read_matrix("layers.2.ffn.experts.0.w1")


def test_a_tensor_that_is_damaged_on_its_way_is_told(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, name = staged(verify(tiny["nvfp4-full"])), "layers.3.attn.wo_b.weight_scale"
    monkeypatch.setattr(StagedFiles, "_copy", lambda _, target, staged: target.fill_(255))
    reader.read(name)
    with pytest.raises(CheckpointError, match=f"'{name}' in .*where it was copied to.*none in the file"):
        reader.check_read()


def test_tables_are_checked_in_pieces(tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4_sgl.checkpoint.reader.CHECKED_BYTES", 1000)
    directory = copy_checkpoint(tiny["nvfp4-full"], tmp_path / "copy")
    entry = verify(directory).inventory.entries["embed.weight"]
    change_tensor(directory, "embed.weight", set_byte(entry.nbytes - 1, 0x7F))
    change_tensor(directory, "embed.weight", set_byte(entry.nbytes - 2, 0x80))
    reader = staged(verify(directory))
    reader.read("embed.weight")
    last = [size - 1 for size in entry.shape]
    with pytest.raises(CheckpointError, match=rf"embed\.weight'.*found inf at index \[{last[0]}, {last[1]}\]"):
        reader.check_read()


def test_errors_of_threads_reach_whoever_asks(tiny: dict[str, Path], tmp_path: Path) -> None:
    """A file that is cut off, or goes, while it is read: expected pieces and others."""
    directory = shutil.copytree(tiny["nvfp4-full"], tmp_path / "copy")  # no links: the file itself is cut
    verified = verify(directory)
    entry = max(verified.inventory.entries.values(), key=lambda entry: (entry.file, entry.offset))
    os.truncate(entry.file, entry.offset)
    for is_expected in (True, False):
        files = StagedFiles(CPU)
        if is_expected:
            files.expect([(entry, None)])
        with pytest.raises(CheckpointError, match=f"{entry.file.name}: became shorter"):
            files.read(entry, None)
        files.release()
    entry.file.unlink()
    with pytest.raises(CheckpointError, match=f"{entry.file.name}: cannot be read"):
        StagedFiles(CPU).read(entry, None)


def test_threads_end_with_the_load(tiny: dict[str, Path]) -> None:
    verified, before = verify(tiny["nvfp4-full"]), set(threading.enumerate())  # some may be another test's, and end
    reader = staged(verified)
    reader.expect([(f"layers.3.ffn.experts.{expert}.w2", None, None) for expert in range(4)])
    assert set(threading.enumerate()) - before
    reader.release()
    assert not set(threading.enumerate()) - before


def test_files_are_let_go_of_when_their_last_tensor_was_read(tiny: dict[str, Path]) -> None:
    verified = verify(tiny["nvfp4-full"])
    for reader, attribute in ((staged(verified), "_open"), (verified.reader(), "_mapped")):
        left = {name: verified.inventory.entries[name].file for name in required(verified)}
        for name in list(left):
            reader.read(name)
            del left[name]
            assert getattr(reader._files, attribute).keys() <= set(left.values())


def test_the_log_says_how_far_the_weights_are(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "PERIOD_SECONDS", 0.0)
    lines: list[str] = []
    verified = verify(tiny["nvfp4-full"])
    reader = verified.reader(say=lines.append)
    for name in required(verified):
        reader.read(name)
    total = sum(verified.inventory.entries[name].nbytes for name in required(verified)) / 1e9
    assert lines[-1].startswith(f"{total:.1f} of {total:.1f} GB, ") and lines[-1].endswith("about 0 s left")
    monkeypatch.setattr(progress, "PERIOD_SECONDS", 3600.0)
    few: list[str] = []
    reader = verified.reader(say=few.append)
    for name in required(verified):
        reader.read(name)
    assert len(few) == 1


def test_only_a_gpu_is_read_to_through_buffers(tiny: dict[str, Path]) -> None:
    verified = verify(tiny["nvfp4-full"])
    assert isinstance(verified.reader("cuda")._files, StagedFiles)
    for device in ("cpu", "meta"):
        assert not verified.reader(device)._files.is_asynchronous
