"""Headers: strict parsing, complete accounting, storages, and speed at full size."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvfp4_sgl.checkpoint.inventory import INDEX, Inventory
from nvfp4_sgl.checkpoint.names import Role, TensorSpec, mtp_specs, tensor_specs
from nvfp4_sgl.checkpoint.quantization import check_quantization_config
from nvfp4_sgl.checkpoint.safetensors_header import ITEM_BYTES, read_header
from nvfp4_sgl.checkpoint.storage import WEIGHT_DTYPES, Storage
from nvfp4_sgl.config import ModelConfig, read_config_json
from nvfp4_sgl.errors import CheckpointError, ConfigError
from tests.support.damage import Stored, change_tensor, copy_checkpoint, file_of, load_stored, remove, store
from tests.support.released import FLASH, PRO

Stored1 = Iterator[tuple[str, str, tuple[int, ...]]]


def nvfp4_full(spec: TensorSpec) -> Stored1:
    n, k = spec.shape
    yield f"{spec.name}.weight", "U8", (n, k // 2)
    yield f"{spec.name}.weight_scale", "F8_E4M3", (n, k // 16)
    yield f"{spec.name}.weight_scale_2", "F32", ()
    yield f"{spec.name}.input_scale", "F32", ()


def modelopt(spec: TensorSpec) -> Stored1:
    """NVIDIA's releases: NVFP4 experts, FP8 elsewhere, bf16 compressors."""
    n, k = spec.shape
    if spec.role is Role.EXPERT_LINEAR:
        yield from nvfp4_full(spec)
    elif "compressor." in spec.name:
        yield f"{spec.name}.weight", "BF16", spec.shape
    else:
        yield f"{spec.name}.weight", "F8_E4M3", spec.shape
        yield f"{spec.name}.scale", "F8_E8M0", (math.ceil(n / 128), math.ceil(k / 128))


def write_headers(directory: Path, config: ModelConfig, stored: Callable[[TensorSpec], Stored1], shards: int) -> int:
    """A checkpoint of full size whose files are all holes; returns the number of tensors."""
    specs = [*tensor_specs(config).values(), *mtp_specs(config).values()]
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    for spec in specs:
        if spec.role.is_matrix:
            tensors += stored(spec)
        else:
            dtype = {Role.PLAIN: "BF16", Role.FP32: "F32", Role.TID2EID: "I64"}[spec.role]
            tensors.append((spec.name, dtype, spec.shape))
    weight_map = {}
    for shard in range(shards):
        file = directory / f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        header, position = {}, 0
        for name, dtype, shape in tensors[shard::shards]:
            end = position + math.prod(shape) * ITEM_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
            weight_map[name], position = file.name, end
        text = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + position)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return len(tensors)


@pytest.mark.parametrize(
    ("released", "stored", "format", "gigabytes"),
    [(FLASH, modelopt, "nvfp4-experts", 164.6), (PRO, nvfp4_full, "nvfp4-full", 888.0)],
    ids=["Flash, NVFP4 experts", "Pro, NVFP4 throughout"],
)
def test_released_sizes_verify_in_seconds(
    tmp_path: Path, released: dict, stored: Callable[[TensorSpec], Stored1], format: str, gigabytes: float
) -> None:
    config = ModelConfig.from_dict(released)
    count = write_headers(tmp_path, config, stored, shards=95)
    started = time.monotonic()
    inventory = Inventory.open(tmp_path)
    summary = inventory.verify(config)
    elapsed = time.monotonic() - started
    assert len(inventory.entries) == count
    assert summary.format == format
    assert summary.count(Role.EXPERT_LINEAR, Storage.NVFP4) == config.num_hidden_layers * config.n_routed_experts * 3
    assert summary.nbytes / 1e9 == pytest.approx(gigabytes, rel=2e-3)
    assert elapsed < 60, f"{count} tensors took {elapsed:.1f} s"


def test_the_numbers_of_parameters_are_those_of_the_released_models() -> None:
    """Totals that the specification states independently (§11)."""
    for released, routed, other, embedding in ((FLASH, 277.0, 6.78, 0.53), (PRO, 1547.4, 24.67, 0.93)):
        sizes = {"routed": 0.0, "other": 0.0, "embedding": 0.0}
        for spec in tensor_specs(ModelConfig.from_dict(released)).values():
            if spec.role is Role.TID2EID:
                continue
            kind = "routed" if spec.role is Role.EXPERT_LINEAR else "other"
            sizes["embedding" if spec.name == "embed.weight" else kind] += math.prod(spec.shape) / 1e9
        assert sizes == pytest.approx({"routed": routed, "other": other, "embedding": embedding}, abs=0.05, rel=1e-2)


def test_summary_of_the_tiny_formats(tiny: dict[str, Path]) -> None:
    expected = {
        "nvfp4-full": (Storage.NVFP4, Storage.NVFP4, Storage.NVFP4),
        "nvfp4-experts": (Storage.NVFP4, Storage.FP8, Storage.PLAIN),
        "bf16": (Storage.PLAIN, Storage.PLAIN, Storage.PLAIN),
    }
    for format, storages in expected.items():
        summary = Inventory.open(tiny[format]).verify(ModelConfig.from_dir(tiny[format]))
        assert summary.format == format
        stems = ("layers.4.ffn.experts.15.w2", "layers.0.ffn.shared_experts.w1", "layers.1.attn.compressor.wkv")
        assert tuple(summary.storages[stem] for stem in stems) == storages
        assert format in summary.table() and "mtp.*" in summary.table()


def test_mtp_is_skipped(tiny: dict[str, Path]) -> None:
    inventory = Inventory.open(tiny["nvfp4-experts"])
    count = sum(name.startswith("mtp.") for name in inventory.entries)
    assert count > 100
    summary = inventory.verify(ModelConfig.from_dir(tiny["nvfp4-experts"]))
    assert (summary.skipped, summary.draft) == (count, "MTP draft")
    (row,) = [line for line in summary.table().splitlines() if "mtp.*" in line]
    assert re.match(rf"draft, mtp\.\* +MTP draft +{count} ", row), "a server may draft with it: it is not left out"


FOREIGN = sorted({*ITEM_BYTES}.difference(*WEIGHT_DTYPES.values()))
"""Dtypes that weights of no format have."""
QUERY, EXPERT, COMPRESSOR = "layers.1.attn.wq_b", "layers.1.ffn.experts.3.w1", "layers.1.attn.compressor.wkv"
WEIGHTS = {
    "NVFP4": ("nvfp4-full", QUERY, "U8"),
    "NVFP4, compressed-tensors": ("compressed-tensors", EXPERT, "U8"),
    "MXFP4": ("deepseek", EXPERT, None),
    "FP8": ("deepseek", QUERY, "F8_E4M3"),
    "FP8, float scales": ("deepseek-base", QUERY, "F8_E4M3"),
    "plain": ("deepseek", COMPRESSOR, "BF16 or F32"),
}
"""A matrix of each storage: its tiny format, its stem, and the dtype that an error expects, if that is always one."""


OTHERS = [
    *((storage, dtype) for storage in WEIGHTS for dtype in (*FOREIGN, "I8")),
    *((storage, "U8") for storage in WEIGHTS if not storage.startswith("NVFP4")),
    *((storage, "I8, packed") for storage in WEIGHTS if storage.startswith("NVFP4")),
]
"""Storages, and what is stored as their weight."""


@pytest.mark.parametrize(("storage", "dtype"), OTHERS)
def test_a_weight_of_a_dtype_that_no_format_has(
    storage: str, dtype: str, tiny: dict[str, Path], tmp_path: Path
) -> None:
    """The error is about its dtype alone, and not about the scales that a matrix of another format would need."""
    format, stem, expected = WEIGHTS[storage]
    dtype, is_packed = dtype.removesuffix(", packed"), dtype.endswith("packed")
    directory, config = copy_checkpoint(tiny[format], tmp_path / "copy"), ModelConfig.from_dir(tiny[format])
    name = f"{stem}.weight_packed" if storage == "NVFP4, compressed-tensors" else f"{stem}.weight"
    n, k = tensor_specs(config)[stem].shape
    shape = [n, k // 2] if is_packed else [n, k]
    change_tensor(directory, name, lambda *_: (dtype, shape, bytes(math.prod(shape) * ITEM_BYTES[dtype])))
    with pytest.raises(CheckpointError) as caught:
        Inventory.open(directory).verify(config)
    message = str(caught.value)
    assert message.count("\n") == 1 and f"'{name}' in {file_of(directory, name)}: wrong dtype: expected " in message
    assert (
        f"found {dtype} {shape}; weights that are read are U8 (NVFP4), I8 or U8 (MXFP4), F8_E4M3 (FP8), BF16" in message
    )
    assert message.endswith("BF16 or F32 (plain): export the checkpoint in one of these formats")
    if expected is not None:
        assert f"expected {expected} [" in message and f"({storage.partition(',')[0]}), found" in message


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "C64", "I4"])
def test_a_dtype_that_is_not_read_at_all(dtype: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny["nvfp4-full"], tmp_path / "copy")
    change_tensor(directory, f"{QUERY}.weight", lambda _, shape, data: (dtype, shape, data))
    with pytest.raises(CheckpointError, match=rf"'{QUERY}\.weight': unknown dtype '{dtype}'; expected one of BOOL, U8"):
        Inventory.open(directory)


def test_weights_of_a_scheme_have_the_same_dtypes() -> None:
    for storage in Storage:
        assert WEIGHT_DTYPES[storage.decoder.scheme or storage.value] == storage.decoder.parts[0].dtypes


def test_codes_of_mxfp4_without_their_scale(tiny: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny["deepseek"], tmp_path / "copy")
    remove(directory, f"{EXPERT}.scale")
    with pytest.raises(CheckpointError, match=rf"\n  - tensor '{EXPERT}\.scale' is missing: expected F8_E8M0[^\n]*$"):
        Inventory.open(directory).verify(ModelConfig.from_dir(directory))


def test_a_prefix_on_every_name_is_stripped(tiny: dict[str, Path], tmp_path: Path) -> None:
    tensors: Stored = {}
    for file in sorted(tiny["bf16"].glob("*.safetensors")):
        tensors |= {f"model.{name}": stored for name, stored in load_stored(file).items()}
    store(tmp_path / "model.safetensors", tensors)
    summary = Inventory.open(tmp_path).verify(ModelConfig.from_dir(tiny["bf16"]))
    assert summary.format == "bf16" and summary.skipped > 0


def test_several_files_without_an_index(tiny: dict[str, Path], tmp_path: Path) -> None:
    directory = copy_checkpoint(tiny["nvfp4-full"], tmp_path / "copy")
    (directory / INDEX).unlink()
    assert Inventory.open(directory).verify(ModelConfig.from_dir(directory)).format == "nvfp4-full"
    sorted(directory.glob("*.safetensors"))[0].unlink()
    with pytest.raises(CheckpointError, match=r"embed\.weight' is missing"):
        Inventory.open(directory).verify(ModelConfig.from_dir(directory))


def test_all_problems_are_counted_and_the_first_listed(tiny: dict[str, Path]) -> None:
    directory = tiny["nvfp4-full"]
    raw = read_config_json(directory) | {"hidden_size": 512}
    with pytest.raises(CheckpointError) as caught:
        Inventory.open(directory).verify(ModelConfig.from_dict(raw))
    message = str(caught.value)
    assert message.count("\n  - ") == 21 and "problems:" in message and "more" in message
    assert "expected BF16 or F32 [512, 512], found BF16 [512, 256]" in message


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"'a'.*takes 8 bytes.*hold 4"),
        ({"a": {"dtype": "F12", "shape": [2], "data_offsets": [0, 4]}}, r"'a'.*unknown dtype 'F12'"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, r"'a'.*non-negative"),
        ({"a": {"dtype": "F32", "shape": [1]}}, r"'a'.*data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, r"'a': a hole.*byte"),
        (
            {
                "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            },
            r"'b': an overlap",
        ),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}, r"truncated: expected \d+ bytes, found \d+"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, r"no tensor accounts for"),
        ([], r"expected a JSON object, found list"),
    ],
)
def test_malformed_headers(tmp_path: Path, header: object, match: str) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=match) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    assert "unknown dtype" in match or str(caught.value).endswith("; fetch the file again")


@pytest.mark.parametrize("data", [b"", b"\1\0\0", (10**9).to_bytes(8, "little") + b"{}", b"\2" + bytes(7) + b"{{"])
def test_files_that_are_not_safetensors(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Inventory.open(tmp_path)


def test_directories_that_hold_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        Inventory.open(tmp_path)
    with pytest.raises(CheckpointError, match="expected a directory"):
        Inventory.open(tmp_path / "absent")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../model.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"'a'.*name of a safetensors file"):
        Inventory.open(tmp_path)


class TestQuantizationConfig:
    """What config.json claims against what is there."""

    @pytest.mark.parametrize(
        ("format", "change", "match"),
        [
            ("nvfp4-experts", {"moe_quant_algo": "FP8"}, r"moe_quant_algo.*experts.*NVFP4"),
            ("nvfp4-experts", {"moe_quant_algo": "W4A8"}, r"moe_quant_algo.*one of NVFP4, MXFP4, FP8.*'W4A8'"),
            (
                "nvfp4-experts",
                {"quant_algo": "NVFP4", "ignore": ["head", "mtp.*"]},
                r"'layers\.\d+\.\S+\.weight' in NVFP4",
            ),
            (
                "nvfp4-experts",
                {"quant_algo": None, "moe_quant_algo": None, "quantized_layers": {}, "config_groups": {}},
                r"as tensor '.*experts.*' is NVFP4",
            ),
            ("nvfp4-experts", {"weight_block_size": [64, 64]}, r"weight_block_size.*\[64, 64\]"),
            ("nvfp4-full", {"group_size": 32}, r"group_size.*16.*32"),
            ("nvfp4-full", {"quant_method": "compressed-tensors"}, r"quant_algo.*one of the fields"),
            ("bf16", {"quant_method": "fp8"}, r"no tensor is quantised"),
        ],
    )
    def test_contradictions(self, tiny: dict[str, Path], format: str, change: dict, match: str) -> None:
        raw = read_config_json(tiny[format])
        summary = Inventory.open(tiny[format]).verify(ModelConfig.from_dir(tiny[format]))
        raw["quantization_config"] = {**raw.get("quantization_config", {}), **change}
        with pytest.raises(ConfigError, match=match):
            check_quantization_config(raw, summary)

    def test_nothing_claimed_is_nothing_checked(self, tiny: dict[str, Path]) -> None:
        for directory in tiny.values():
            check_quantization_config({}, Inventory.open(directory).verify(ModelConfig.from_dir(directory)))
