"""Every GEMM of a rank of Pro on eight GPUs: what kernels ask of its sizes, and the kernels that ``build`` compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl import build
from nvfp4_sgl.checkpoint.names import tensor_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.cutedsl_kernels.plan import every_key
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.limits import (
    FEATURE_MULTIPLE,
    GATED_FEATURE_MULTIPLE,
    GEMM_K_MULTIPLE,
    MAX_GEMM_EXPERTS,
    MAX_HIDDEN_SIZE,
    MAX_INDEX_HEADS,
    MAX_INDEX_TOPK,
    MAX_NORM_WIDTH,
    MAX_ROUTED_EXPERTS,
)
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import BASE, TinyFormat, tiny_config
from nvfp4_sgl.targets.requirements import check_target
from nvfp4_sgl.targets.target import descriptor
from nvfp4_sgl.weights.gemms import GemmSpec
from nvfp4_sgl.weights.parallel import Ownership
from tests.support.released import PRO, config_json

RANKS = 8
TARGETS = ("sm_90a", "sm_100a")
LAYERS = 5
"""The first five are of every kind that Pro has, routed by token ids and by scores."""
SCALE_BLOCK, GROUP_BLOCKS = 16, 4
"""Values of a block scale, and block scales that kernels read at a time."""
LINE = 16
"""Bytes at whose multiples a copy to shared memory begins."""
PART = re.compile(r"layers\.(\d+)\.")


def pro(**changes: Any) -> ModelConfig:
    ratios = [*PRO["compress_ratios"][:LAYERS], 0]
    return ModelConfig.from_dict(config_json(PRO, num_hidden_layers=LAYERS, compress_ratios=ratios) | changes)


def nvfp4(stem: str) -> Storage:
    return Storage.NVFP4


def faults(gemm: GemmSpec, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Sizes of a GEMM that no kernel takes, by its name; ``shapes`` of the whole matrices."""
    features = GATED_FEATURE_MULTIPLE if gemm.gated else FEATURE_MULTIPLE
    for what, value, multiple in (
        ("K", gemm.k, GEMM_K_MULTIPLE),
        ("bytes of a row of codes", gemm.k // 2, LINE),
        ("block scales of a row", gemm.k // SCALE_BLOCK, GROUP_BLOCKS),
        ("features", gemm.features, features),
        ("bytes of a bf16 result", 2 * gemm.features, LINE),
    ):
        if value % multiple:
            yield f"{gemm.name}: {what}: {value}, expected a multiple of {multiple}"
    if gemm.groups > MAX_GEMM_EXPERTS:
        yield f"{gemm.name}: groups: {gemm.groups}, expected at most {MAX_GEMM_EXPERTS}"
    for shard in gemm.shards:
        rows, columns = shapes[shard.stem]
        for what, part, total, multiple in (("rows", shard.rows, rows, 1), ("K", shard.cols, columns, SCALE_BLOCK)):
            first, last = (0, total) if part is None else (part.start, part.stop)
            if not 0 <= first < last <= total or first % multiple or last % multiple:
                yield f"{shard.stem}: {what} {first} to {last} of {total}, expected whole blocks of {multiple}"


@pytest.mark.parametrize("target", TARGETS)
def test_every_gemm_of_every_rank_is_one_that_kernels_take(target: str) -> None:
    config = pro()
    assert {*config.layer_kinds} == {LayerKind.CSA, LayerKind.HCA}
    assert {config.is_hash_routed(layer) for layer in range(LAYERS)} == {True, False}
    shapes = {spec.name: spec.shape for spec in tensor_specs(config).values() if spec.role.is_matrix}
    covered: dict[str, int] = dict.fromkeys(shapes, 0)
    for rank in range(RANKS):
        gemms = list(descriptor(target).gemms(config, Ownership(rank, RANKS), nvfp4, None))
        found = [fault for gemm in gemms for fault in faults(gemm, shapes)]
        assert not found, "\n".join(found)
        for shard in (shard for gemm in gemms for shard in gemm.shards):
            rows, columns = shapes[shard.stem]
            parts = [total if part is None else part.stop - part.start for part, total in
                     ((shard.rows, rows), (shard.cols, columns))]  # fmt: skip
            covered[shard.stem] += parts[0] * parts[1]
    split = {"wq_b", "wo_a", "wo_b", "w1", "w2", "w3"}
    for name, elements in covered.items():
        rows, columns = shapes[name]
        is_split = name.rpartition(".")[2] in split and "indexer" not in name
        assert elements == rows * columns * (1 if is_split else RANKS), name


def test_what_a_rank_holds() -> None:
    """Heads 128 / 8, o-groups 16 / 8, of each expert 3072 / 8 columns: whole block scales, K of a multiple of 64."""
    config, owner = pro(), Ownership(RANKS - 1, RANKS)
    assert (len(owner.heads(config)), len(owner.o_groups(config)), len(owner.experts(config).inner)) == (16, 2, 384)
    gemms = {gemm.name: gemm for gemm in descriptor("sm_90a").gemms(config, owner, nvfp4, None)}
    assert (gemms["wq_b"].features, gemms["wq_b"].k) == (8192, 1536)
    assert (gemms["wo_a"].groups, gemms["wo_a"].features, gemms["wo_a"].k) == (2, 1024, 4096)
    assert (gemms["wo_b"].features, gemms["wo_b"].k) == (7168, 2048)
    assert (gemms["experts.w2"].groups, gemms["experts.w2"].features, gemms["experts.w2"].k) == (385, 7168, 384)
    # SGLang pads the vocabulary to a multiple of 64 before it splits it; 16 bytes are 8 columns of bf16 logits.
    assert config.vocab_size % (64 * RANKS) == 256 and config.vocab_size % (8 * RANKS) == 0


@pytest.mark.parametrize("target", TARGETS)
def test_the_target_takes_it(target: str) -> None:
    config = pro()
    check_target(target, config, RANKS, nvfp4, longest=config.max_position_embeddings)
    assert config.hidden_size <= MAX_HIDDEN_SIZE and config.q_lora_rank <= MAX_NORM_WIDTH
    assert config.n_routed_experts <= MAX_ROUTED_EXPERTS and config.index_n_heads <= MAX_INDEX_HEADS
    assert config.index_topk <= MAX_INDEX_TOPK


@pytest.mark.parametrize(("inner", "named"), [(2304, "experts.w2: K"), (3072 + 128, "shared_experts|experts.w2: K")])
def test_a_share_that_no_kernel_takes_is_named(inner: int, named: str) -> None:
    config = pro(moe_intermediate_size=inner)
    shapes = {spec.name: spec.shape for spec in tensor_specs(config).values() if spec.role.is_matrix}
    gemms = descriptor("sm_90a").gemms(config, Ownership(0, RANKS), nvfp4, None)
    assert any(re.match(named, fault) for gemm in gemms for fault in faults(gemm, shapes))
    with pytest.raises(ConfigError, match=r"--tp-size 8: experts\.w"):
        check_target("sm_90a", config, RANKS, nvfp4)


@pytest.mark.parametrize("target", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.full)])
def test_build_compiles_kernels_that_exist(target: str, tmp_path: Path) -> None:
    """All GEMMs of a server of Pro with 256 requests are among those that plans may ask for; Triton's are foreseen.

    ``test_served_sizes`` goes through the passes of such a server on SM100.
    """
    fields = config_json(PRO, num_hidden_layers=LAYERS, compress_ratios=[*PRO["compress_ratios"][:LAYERS], 0])
    known = {name: value for name, value in fields.items() if name in BASE or name == "compress_ratios"}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(TinyFormat.NVFP4_FULL, known)))
    setting = build.Serving(RANKS, 16384, 256, 8192)
    keys, variants = build.needed(verify_dummy(tmp_path), target, setting, descriptor(target).gpu())
    existing = {*every_key(target, PRO["swiglu_limit"], ("bf16", "fp32"))}
    assert {*keys} <= existing, [key for key in keys if key not in existing]
    assert len(keys) > 20 and len(variants) > 50
    assert {key.shape.output for key in keys} >= {"bf16", "fp32"}
