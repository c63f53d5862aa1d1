"""Merged and stacked matrices hold the checkpoint's bytes, as the reference and as SM100's GEMMs take them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.formats.scale_layout import unswizzle_128x4
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.weights.layout import attention_matrices, expert_matrices
from nvfp4_sgl.weights.matrix import load_matrix, stack
from nvfp4_sgl.weights.parallel import TensorParallel
from nvfp4_sgl.weights.source import Shard

LAYER = 1
"""A layer of kind CSA: it merges most."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, "nvfp4-full", seed=11)
    return folder


@pytest.fixture(scope="module")
def config(path: Path) -> ModelConfig:
    return ModelConfig.from_dir(path)


@pytest.fixture(scope="module")
def raw(path: Path) -> Mapping[str, Tensor]:
    """Every tensor, by safetensors' own reader."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            found.update({key: handle.get_tensor(key) for key in handle.keys()})  # noqa: SIM118
    return found


@pytest.fixture
def reader(path: Path, config: ModelConfig) -> CheckpointReader:
    inventory = Inventory.open(path)
    inventory.verify(config)
    return CheckpointReader(inventory)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def stored(raw: Mapping[str, Tensor], shards: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and each row's global scale of shards one below the other."""
    packed = torch.cat([raw[f"{s.stem}.weight"] for s in shards])
    scales = torch.cat([as_bytes(raw[f"{s.stem}.weight_scale"]) for s in shards])
    alphas = [raw[f"{s.stem}.weight_scale_2"].reshape(1).expand(len(raw[f"{s.stem}.weight"])) for s in shards]
    return packed, scales, torch.cat(alphas)


def require_equal(matrix: Any, expected: tuple[Tensor, Tensor, Tensor]) -> None:
    assert isinstance(matrix, NvFp4Tensor)
    assert torch.equal(matrix.packed, expected[0])
    assert torch.equal(as_bytes(matrix.block_scale), expected[1])
    assert torch.equal(matrix.global_scale_of_rows(), expected[2])


def test_merged(reader: CheckpointReader, config: ModelConfig, raw: Mapping[str, Tensor]) -> None:
    matrices = attention_matrices(config, config.layer(LAYER), TensorParallel())
    assert len(matrices.from_x) == 6 and len(matrices.from_q) == 2
    for shards in (matrices.from_x, matrices.from_q):
        require_equal(load_matrix(reader, shards), stored(raw, shards))


def test_grouped(reader: CheckpointReader, config: ModelConfig, raw: Mapping[str, Tensor]) -> None:
    matrices = attention_matrices(config, config.layer(LAYER), TensorParallel())
    whole = stored(raw, [matrices.wo_a])
    expected = tuple(part.unflatten(0, (matrices.groups, -1)) for part in whole)
    found = load_matrix(reader, [matrices.wo_a], groups=matrices.groups)
    require_equal(found, (expected[0], expected[1], expected[2]))
    assert found.shape == (matrices.groups, config.o_lora_rank, whole[0].shape[1] * 2)


def test_stacked(reader: CheckpointReader, config: ModelConfig, raw: Mapping[str, Tensor]) -> None:
    experts = expert_matrices(config, config.layer(LAYER), TensorParallel())[:-1]
    found = stack([load_matrix(reader, expert.gate_up) for expert in experts], [e.down.stem for e in experts])
    expected = [stored(raw, expert.gate_up) for expert in experts]
    assert isinstance(found, NvFp4Tensor)
    for index, one in enumerate(expected):
        require_equal(NvFp4Tensor(found.packed[index], found.block_scale[index], found.global_scale[index]), one)
    assert any(len(one[2].unique()) == 2 for one in expected), "gates and ups with scales of their own are among them"


def test_a_rank_has_its_rows_and_columns(
    reader: CheckpointReader, config: ModelConfig, raw: Mapping[str, Tensor]
) -> None:
    expert = expert_matrices(config, config.layer(LAYER), TensorParallel(1, 2, lambda _, part: part))[3]
    half = config.moe_intermediate_size // 2
    up, down = expert.gate_up[1].stem, expert.down.stem
    found = load_matrix(reader, [expert.gate_up[1]])
    assert isinstance(found, NvFp4Tensor) and torch.equal(found.packed, raw[f"{up}.weight"][half:])
    found = load_matrix(reader, [expert.down])
    assert isinstance(found, NvFp4Tensor) and torch.equal(found.packed, raw[f"{down}.weight"][:, half // 2 :])
    assert torch.equal(as_bytes(found.block_scale), as_bytes(raw[f"{down}.weight_scale"])[:, half // 16 :])


def test_storages_do_not_mix(reader: CheckpointReader) -> None:
    shards = [Shard(f"layers.{LAYER}.attn.wq_a"), Shard(f"layers.{LAYER}.ffn.gate")]
    with pytest.raises(CheckpointError, match=r"wq_a is NVFP4; .*gate is not; quantise all of them or none"):
        load_matrix(reader, shards)


def test_sm100_keeps_them_packed(path: Path, config: ModelConfig, raw: Mapping[str, Tensor]) -> None:
    """What a layer holds on SM100 is no more than the checkpoint: codes as they are, block scales swizzled."""
    layer: Any = Standalone(path, target="sm_100a", capacity=256).decoder.layers[LAYER]
    weights = layer.attn.project_x.projection.gemms[0].weights
    packed, scales, alphas = stored(raw, attention_matrices(config, config.layer(LAYER), TensorParallel()).from_x)
    assert torch.equal(weights.codes, packed) and torch.equal(weights.scale, alphas)
    assert torch.equal(unswizzle_128x4(as_bytes(weights.block_scales), *scales.shape), scales)
    experts = expert_matrices(config, config.layer(LAYER), TensorParallel())
    for index, expert in enumerate(experts):
        packed, _, alphas = stored(raw, expert.gate_up)
        half = len(packed) // 2
        found = layer.ffn.experts.gemms.w13.codes[index].unflatten(0, (-1, 2, 16))
        assert torch.equal(found.transpose(0, 1).flatten(1, 2), packed.unflatten(0, (2, half)))
        assert torch.equal(layer.ffn.experts.gemms.w13.scale[index], alphas[[0, -1]])
        assert torch.equal(layer.ffn.experts.gemms.w2.codes[index], raw[f"{expert.down.stem}.weight"])
