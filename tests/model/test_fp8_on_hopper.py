"""FP8 matrices on Hopper: which stay packed, that they hold the checkpoint's values on every rank, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.cutedsl_kernels.sm90.fp8_layout import unpack_fp8_tiles
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.fused.gated import SwiGluGemm
from nvfp4_sgl.targets.fused.gemm_bf16 import Bf16Gemm
from nvfp4_sgl.targets.fused.gemm_w8a16 import W8A16Gemm, tiled
from nvfp4_sgl.weights.layout import attention_matrices, expert_matrices
from nvfp4_sgl.weights.parallel import TensorParallel
from nvfp4_sgl.weights.source import Shard

SWA, CSA, HCA = range(3)


@pytest.fixture(scope="module", params=["deepseek", "nvfp4-experts"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, request.param, seed=11, num_hidden_layers=3)
    return folder


def decoder(path: Path, rank: int = 0, ranks: int = 1) -> Any:
    parallel = TensorParallel(rank, ranks)
    return Standalone(path, target="sm_90a", requests=1, capacity=256, parallel=parallel).decoder


def reader(path: Path) -> tuple[CheckpointReader, ModelConfig]:
    inventory, config = Inventory.open(path), ModelConfig.from_dir(path)
    inventory.verify(config)
    return CheckpointReader(inventory), config


def values(weights: Any) -> Tensor:
    """fp32 [matrices, features, K]."""
    return MxFp8Tensor(*unpack_fp8_tiles(weights.tiles, weights.features, weights.k)).dequantize()


def kinds(projection: Any) -> list[type]:
    return [type(gemm) for gemm in projection.gemms]


def test_what_stays_packed(path: Path) -> None:
    """Compressors are BF16, so that what is merged with them is dequantised."""
    for layer, block in enumerate(decoder(path).layers):
        attention = block.attn
        for part in (attention.project_q, attention.wo_b):
            assert kinds(part) == [W8A16Gemm]
        assert isinstance(attention.wo_a.gemm, W8A16Gemm)
        shared = block.ffn.experts.shared
        assert isinstance(shared.w13, SwiGluGemm)
        assert isinstance(shared.w13.gemm, W8A16Gemm) and isinstance(shared.w2, W8A16Gemm)
        assert kinds(attention.project_x.projection) == [W8A16Gemm if layer == SWA else Bf16Gemm]
        assert attention.project_x.index_weights is None


@pytest.mark.parametrize("rank", [0, 1])
def test_every_value_is_the_checkpoints(path: Path, rank: int) -> None:
    source, config = reader(path)
    parallel = TensorParallel(rank, 2)
    block = decoder(path, rank, 2).layers[CSA]

    def stored(shards: Any) -> Tensor:
        parts = (source.read_matrix(shard.stem, rows=shard.rows, cols=shard.cols) for shard in shards)
        return torch.cat([part.float() for part in parts])

    matrices = attention_matrices(config, config.layer(CSA), parallel)
    shared = expert_matrices(config, config.layer(CSA), parallel)[-1]
    expert = block.ffn.experts.shared
    for gemm, shards in (
        (block.attn.project_q.gemms[0], matrices.from_q),
        (block.attn.wo_a.gemm, [matrices.wo_a]),
        (block.attn.wo_b.gemms[0], [matrices.wo_b]),
        (expert.w13.gemm, shared.gate_up),
        (expert.w2, [shared.down]),
    ):
        assert torch.equal(values(gemm.weights.operand).flatten(0, 1), stored(shards)), shards
        assert gemm.weights.ones.tolist() == [1.0]


def test_other_storages_are_dequantised(tmp_path: Path) -> None:
    write_tiny(tmp_path, "deepseek-base", seed=11, num_hidden_layers=1)
    attention = decoder(tmp_path).layers[0].attn
    assert kinds(attention.project_q) == [Bf16Gemm] and isinstance(attention.wo_a.gemm, Bf16Gemm)


@pytest.mark.parametrize(
    ("place", "value", "message"), [("codes", 0x7F, "codes: expected finite"), ("scale", 150, "scale: expected 2")]
)
def test_what_the_gemms_do_not_take_is_named(place: str, value: int, message: str) -> None:
    codes, scale = torch.full((8, 64), 1, dtype=torch.uint8), torch.full((8, 2), 127, dtype=torch.uint8)
    {"codes": codes, "scale": scale}[place][5] = value
    matrix = MxFp8Tensor(codes.view(torch.float8_e4m3fn), scale)
    with pytest.raises(
        CheckpointError, match=f"'layers.0.attn.wq_a.weight', 'b.weight': .*{message}.*nvfp4-sgl convert"
    ):
        tiled(matrix, [Shard("layers.0.attn.wq_a"), Shard("b")])
