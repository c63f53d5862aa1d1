"""Every published format, under both kinds of names: what a matrix means, to a rank and to whoever made the format."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization.quant_scheme import NVFP4, QuantizationScheme
from torch import Tensor

from nvfp4_sgl import cli
from nvfp4_sgl.checkpoint.inventory import INDEX
from nvfp4_sgl.checkpoint.names import tensor_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.transformers_names import original_name, transformers_name
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, TinyNames
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
from tests.support.dequantize import dequantize_checkpoint
from tests.support.matrices import values_of
from tests.support.oracle import hf_model
from tests.support.ranks import Exchange

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 8}
"""One layer of each kind."""
STORED = {
    TinyFormat.NVFP4_FULL: {Storage.NVFP4},
    TinyFormat.NVFP4_EXPERTS: {Storage.NVFP4, Storage.FP8, Storage.PLAIN},
    TinyFormat.COMPRESSED_TENSORS: {Storage.NVFP4_COMPRESSED, Storage.FP8_FLOAT_SCALES, Storage.PLAIN},
    TinyFormat.DEEPSEEK: {Storage.MXFP4, Storage.FP8, Storage.PLAIN},
    TinyFormat.DEEPSEEK_BASE: {Storage.FP8_FLOAT_SCALES, Storage.PLAIN},
    TinyFormat.BF16: {Storage.PLAIN},
}
EXPERT = "layers.2.ffn.experts.5.w1"
Change = Callable[[str, list[int], bytes], tuple[str, list[int], bytes]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[TinyFormat, TinyNames], Path]:
    root, found = tmp_path_factory.mktemp("formats"), {}
    for format in TinyFormat:
        for names in TinyNames:
            found[format, names] = root / f"{format.value}-{names.value}"
            write_tiny(found[format, names], format, seed=21, names=names, **SIZES)
    return found


def test_every_storage_is_in_some_format() -> None:
    assert set().union(*STORED.values()) == set(Storage)


@pytest.mark.parametrize("names", TinyNames)
@pytest.mark.parametrize("format", TinyFormat)
def test_matrices_mean_what_their_bytes_say(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path], format: TinyFormat, names: TinyNames
) -> None:
    directory = checkpoints[format, names]
    verified = verify(directory)
    assert set(verified.summary.storages.values()) == STORED[format]
    stored = dequantize_checkpoint(directory)
    expected = {original_name(name) if names is TinyNames.TRANSFORMERS else name: v for name, v in stored.items()}
    specs, reader = tensor_specs(verified.config), verified.reader()
    assert expected.keys() == {spec.key for spec in specs.values()}
    for spec in specs.values():
        found = values_of(reader.read_matrix(spec.name)) if spec.role.is_matrix else reader.read(spec.name)
        values = expected[spec.key].astype(np.float64)
        if verified.summary.storages.get(spec.name) is Storage.NVFP4_COMPRESSED:
            # The reciprocal of the global scale is rounded once, and so is the product with it.
            assert np.allclose(found.double().numpy(), values, rtol=2**-22, atol=0), spec.name
        else:
            assert np.array_equal(found.double().numpy(), values), spec.name
    reader.finish()


@pytest.mark.parametrize("format", TinyFormat)
def test_shares_are_parts_of_the_whole(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path], format: TinyFormat
) -> None:
    verified = verify(checkpoints[format, TinyNames.ORIGINAL])
    reader = verified.reader()
    for stem in ("layers.1.ffn.experts.3.w2", "layers.1.ffn.shared_experts.w3", "layers.0.attn.wo_b", EXPERT):
        whole = values_of(reader.read_matrix(stem))
        n, k = whole.shape
        for size in (2, 4, 8):
            rows = [values_of(reader.read_matrix(stem, rows=_share(n, size, rank))) for rank in range(size)]
            cols = [values_of(reader.read_matrix(stem, cols=_share(k, size, rank))) for rank in range(size)]
            assert torch.equal(torch.cat(rows), whole) and torch.equal(torch.cat(cols, dim=1), whole), (stem, size)


def _share(total: int, size: int, rank: int) -> slice:
    return slice(total // size * rank, total // size * (rank + 1))


@pytest.mark.parametrize("format", [f for f in TinyFormat if f is not TinyFormat.BF16])
def test_two_ranks_say_what_one_says(checkpoints: dict[tuple[TinyFormat, TinyNames], Path], format: TinyFormat) -> None:
    directory = checkpoints[format, TinyNames.ORIGINAL]
    ids = torch.randint(2, 500, (80,), generator=torch.Generator().manual_seed(3)).tolist()
    exchange = Exchange()

    def of_rank(rank: int) -> Tensor:
        parallel = exchange.ranks[rank]
        return Standalone(directory, capacity=256, parallel=parallel).extend({1: ids})[1].log_softmax(-1)

    alone = Standalone(directory, capacity=256).extend({1: ids})[1].log_softmax(-1)
    for found in exchange.run(of_rank):
        assert (found - alone).abs().max().item() <= 1e-4


@pytest.mark.parametrize("names", TinyNames)
def test_compressed_tensors_own_decoder_agrees(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path], names: TinyNames
) -> None:
    directory = checkpoints[TinyFormat.COMPRESSED_TENSORS, names]
    reader = verify(directory).reader()
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    for stem in ("layers.0.ffn.experts.1.w1", "layers.0.ffn.experts.1.w3", "layers.2.ffn.experts.7.w2"):
        state = {
            "weight_packed": reader.read(f"{stem}.weight_packed"),
            "weight_scale": reader.read(f"{stem}.weight_scale"),
            "weight_global_scale": reader.read(f"{stem}.weight_global_scale"),
        }
        theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        ours = values_of(reader.read_matrix(stem))
        # They round scales and products to bf16.
        assert torch.allclose(ours, theirs.float(), rtol=2**-7, atol=0) and theirs.float().abs().max() > 0


# --- names --------------------------------------------------------------------------------------------------------


def test_names_are_translated_both_ways() -> None:
    config = ModelConfig.from_dict(json.loads(json.dumps(_config())))
    for spec in tensor_specs(config).values():
        for name in (spec.key, spec.name):
            theirs = transformers_name(name)
            assert theirs is not None and theirs != name and original_name(theirs) == name
    assert original_name("model.mtp.0.enorm.weight") == original_name("mtp.0.enorm.weight") == "mtp.0.enorm.weight"
    older = "model.layers.2.self_attn.compressor.indexer.weights_proj.weight"
    assert original_name(older) == "layers.2.attn.indexer.weights_proj.weight"
    for name in ("model.layers.0.self_attn.wq_a.weight", "model.layers.0.mlp.experts.gate_up_proj", "embed.weight"):
        assert original_name(name) is None


def _config() -> dict:
    from nvfp4_sgl.synthetic.tiny_config import tiny_config

    return tiny_config(TinyFormat.BF16, {})


def test_the_names_are_those_of_transformers_modules(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path],
) -> None:
    directory = checkpoints[TinyFormat.BF16, TinyNames.ORIGINAL]
    names = hf_model(directory).state_dict().keys()
    found = {name: original_name(name) for name in names if "inv_freq" not in name and ".mlp.experts." not in name}
    keys = {spec.key for spec in tensor_specs(ModelConfig.from_dir(directory)).values()}
    assert set(found.values()) == {key for key in keys if ".ffn.experts." not in key}


def test_a_name_that_transformers_has_not_is_refused(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    directory = copy_checkpoint(checkpoints[TinyFormat.BF16, TinyNames.TRANSFORMERS], tmp_path / "copy")
    (directory / INDEX).unlink()
    file = sorted(directory.glob("*.safetensors"))[0]
    store(file, load_stored(file) | {"model.layers.0.mlp.experts.gate_up_proj": ("BF16", [1], b"\0\0")})
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.experts\.gate_up_proj' in .*one by one"):
        verify(directory)


def test_errors_give_the_name_in_the_file_too(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    directory = copy_checkpoint(checkpoints[TinyFormat.BF16, TinyNames.TRANSFORMERS], tmp_path / "copy")
    name = "model.layers.1.self_attn.q_a_proj.weight"
    change_tensor(directory, name, lambda dtype, shape, data: ("F32", [shape[0], shape[1] // 2], data))
    with pytest.raises(CheckpointError) as caught:
        verify(directory)
    assert f"'layers.1.attn.wq_a.weight' (stored as '{name}')" in str(caught.value)


# --- drafts -------------------------------------------------------------------------------------------------------


def test_a_dspark_release_is_read_and_its_draft_left_out(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    """Flash-0731 has three stages: compress_ratios has entries for them, num_nextn_predict_layers says 1."""
    directory = copy_checkpoint(checkpoints[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL], tmp_path / "copy")
    (directory / INDEX).unlink()
    file = sorted(directory.glob("*.safetensors"))[-1]
    draft = {f"mtp.{stage}.attn.wkv.weight": ("BF16", [2], bytes(4)) for stage in (1, 2)}
    draft["mtp.0.main_proj.weight"] = draft["mtp.2.markov_head.markov_w1.weight"] = ("BF16", [2], bytes(4))
    store(file, load_stored(file) | draft)

    def as_released(config: dict) -> None:
        config["compress_ratios"] += [0, 0]
        config |= {"dspark_block_size": 5, "dspark_target_layer_ids": [0, 1, 2]}

    change_json(directory / "config.json", as_released)
    summary = verify(directory).summary
    assert summary.draft == "DSpark draft" and "DSpark draft" in summary.table()
    reader = verify(directory).reader()
    for spec in tensor_specs(ModelConfig.from_dir(directory)).values():
        _ = reader.read_matrix(spec.name) if spec.role.is_matrix else reader.read(spec.name)
    reader.finish()


# --- damage -------------------------------------------------------------------------------------------------------

DAMAGED: Mapping[str, tuple[TinyFormat, str, Change, str]] = {
    "MXFP4, NaN": (TinyFormat.DEEPSEEK, f"{EXPERT}.scale", set_byte(9, 0xFF), r"no NaN scale.*\[1, 1\]"),
    "inverse global scale of 0": (
        TinyFormat.COMPRESSED_TENSORS,
        f"{EXPERT}.weight_global_scale",
        set_float(0, 0.0),
        r"an inverse scale > 0.*found 0\.0",
    ),
    "inverse global scale without end": (
        TinyFormat.COMPRESSED_TENSORS,
        f"{EXPERT}.weight_global_scale",
        set_float(0, float("inf")),
        "an inverse scale > 0.*found inf",
    ),
    "negative block scale": (
        TinyFormat.COMPRESSED_TENSORS,
        f"{EXPERT}.weight_scale",
        set_byte(3, 0xB8),
        r"block scales that are numbers.*\[0, 3\]",
    ),
    "negative FP8 scale": (
        TinyFormat.DEEPSEEK_BASE,
        f"{EXPERT}.scale",
        set_float(1, -1.0),
        r"finite scales >= 0.*\[0, 1\]",
    ),
    "NaN FP8 scale": (TinyFormat.DEEPSEEK_BASE, f"{EXPERT}.scale", set_float(0, float("nan")), "finite scales"),
    "NaN FP8 value": (TinyFormat.DEEPSEEK_BASE, f"{EXPERT}.weight", set_byte(5, 0x7F), r"no NaN.*\[0, 5\]"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_values_that_cannot_be_are_refused(
    case: str, checkpoints: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    format, name, change, message = DAMAGED[case]
    directory = copy_checkpoint(checkpoints[format, TinyNames.ORIGINAL], tmp_path / "copy")
    change_tensor(directory, name, change)
    reader = verify(directory).reader()
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' in .*{message}"):
        reader.read_matrix(EXPERT)


@pytest.mark.parametrize(
    ("format", "suffix"),
    [
        (TinyFormat.COMPRESSED_TENSORS, "weight_packed"),
        (TinyFormat.COMPRESSED_TENSORS, "weight_scale"),
        (TinyFormat.COMPRESSED_TENSORS, "weight_global_scale"),
        (TinyFormat.DEEPSEEK_BASE, "weight"),
        (TinyFormat.DEEPSEEK_BASE, "scale"),
        (TinyFormat.DEEPSEEK, "weight"),
        (TinyFormat.DEEPSEEK, "scale"),
    ],
)
def test_a_part_that_is_missing_is_named(
    format: TinyFormat, suffix: str, checkpoints: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    directory = copy_checkpoint(checkpoints[format, TinyNames.ORIGINAL], tmp_path / "copy")
    file = file_of(directory, f"{EXPERT}.{suffix}")
    (directory / INDEX).unlink()
    store(file, {name: stored for name, stored in load_stored(file).items() if name != f"{EXPERT}.{suffix}"})
    with pytest.raises(CheckpointError, match=rf"'{EXPERT}\.[a-z_]+'"):
        verify(directory)


# --- exactness ----------------------------------------------------------------------------------------------------


def _set_scales(directory: Path, stem: str, scales: dict[int, int]) -> None:
    """Give the blocks of an MXFP4 matrix, by their place, other scale bytes."""

    def change(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
        changed = bytearray(data)
        for place, byte in scales.items():
            changed[place] = byte
        return dtype, shape, bytes(changed)

    change_tensor(directory, f"{stem}.scale", change)


def test_matrices_that_nvfp4_cannot_hold_are_all_named(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = checkpoints[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL]
    assert cli.main(["inspect", str(whole), "--scales"]) == 0
    assert "72 of 72 matrices" in capsys.readouterr().out
    directory = copy_checkpoint(whole, tmp_path / "copy")
    wide, low = "layers.2.ffn.experts.7.w2", EXPERT
    _set_scales(directory, wide, {3: 100, 4: 118})
    _set_scales(directory, low, {0: 90})
    assert cli.main(["inspect", str(directory), "--scales"]) == 1
    out = capsys.readouterr().out
    assert "70 of 72 matrices" in out and f"not exact: {wide}: block exponents from -27" in out and low in out
    with pytest.raises(CheckpointError) as caught:
        Standalone(directory, capacity=256)
    for text in ("2 of 72 MXFP4 matrices", f"'{wide}'", f"'{low}'", "ModelOpt"):
        assert text in str(caught.value)
    with pytest.raises(CheckpointError, match=wide):  # no share hides what another share has
        verify(directory).reader().read_matrix(wide, rows=slice(128, 256))


def test_the_scale_of_a_block_of_zeros_means_nothing(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path], tmp_path: Path
) -> None:
    directory = copy_checkpoint(checkpoints[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL], tmp_path / "copy")
    before = values_of(verify(directory).reader().read_matrix(EXPERT)).clone()
    change_tensor(
        directory, f"{EXPERT}.weight", lambda dtype, shape, data: (dtype, shape, bytes([0x80] * 16) + data[16:])
    )
    _set_scales(directory, EXPERT, {0: 3})
    reader = verify(directory).reader()
    assert reader.problems() == {}
    before[0, :32] = 0
    assert torch.equal(values_of(reader.read_matrix(EXPERT)), before)


def test_what_was_converted_is_logged(
    checkpoints: dict[tuple[TinyFormat, TinyNames], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        Standalone(checkpoints[TinyFormat.DEEPSEEK, TinyNames.ORIGINAL], capacity=256)
    messages = [record.message for record in caplog.records]
    assert "72 MXFP4 matrices are NVFP4 now, every value as it was" in messages
