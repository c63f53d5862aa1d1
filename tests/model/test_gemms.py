"""The list of the layers' GEMMs against the released models' tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvfp4_sgl.checkpoint.names import Role, tensor_specs
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.weights.gemms import (
    TOGETHER,
    OperandKind,
    distinct_gemms,
    draft_gemms,
    launched_gemms,
    step_gemms,
    without_index_queries,
)
from nvfp4_sgl.weights.parallel import Ownership
from tests.support.released import FLASH, PRO, config_json


@pytest.mark.parametrize(("base", "kinds"), [(FLASH, 3), (PRO, 2)], ids=["flash", "pro"])
def test_products_cover_every_parameter_of_a_layer_once(base: dict, kinds: int) -> None:
    config = ModelConfig.from_dict(config_json(base))
    specs = [spec for spec in tensor_specs(config).values() if spec.role.is_matrix]
    assert len(set(config.layer_kinds)) == kinds
    experts = config.n_routed_experts
    for layer in (config.layer_kinds.index(kind) for kind in set(config.layer_kinds)):
        here = [spec for spec in specs if spec.name.startswith(f"layers.{layer}.")]
        wanted = sum(spec.shape[0] * spec.shape[1] for spec in here if spec.role is Role.LINEAR)
        wanted += sum(spec.shape[0] * spec.shape[1] for spec in here if spec.role is Role.EXPERT_LINEAR)
        compressed = config.kind(layer) is not LayerKind.SWA
        indexed = config.kind(layer) is LayerKind.CSA
        mine = [
            product
            for product in distinct_gemms(config)
            if (("compressor" in product.name) == compressed or "wq_a" not in product.name)
            and (("indexer" in product.name) == indexed or "wq_" not in product.name)
        ]
        found = sum(one.features * one.k * one.groups * (2 if one.gated else 1) for one in mine)
        assert found == wanted
        assert max(one.groups for one in mine) == experts + 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_heads_groups_and_experts(ranks: int) -> None:
    config = ModelConfig.from_dict(config_json(PRO))
    whole, part = distinct_gemms(config), distinct_gemms(config, ranks)
    for one, share in zip(whole, part, strict=True):
        assert one.name == share.name
        size = one.features * one.k * one.groups
        if one.name.startswith("wq_a"):
            assert share == one
        elif one.name == "wq_b + indexer.wq_b":
            assert (one.features - share.features) * ranks == (one.features - 64 * 128) * (ranks - 1)
        else:
            assert share.features * share.k * share.groups * ranks == size


@pytest.mark.parametrize(("base", "layers"), [(FLASH, 43), (PRO, 61)], ids=["flash", "pro"])
def test_a_pass_launches_six_products_a_layer(base: dict, layers: int) -> None:
    config = ModelConfig.from_dict(config_json(base))
    found = step_gemms(config, 8)
    assert found.total() == 6 * layers
    assert {found[one] for one in found if "experts" in one.name} == {layers}
    from_q = {name: sum(found[one] for one in found if one.name == name) for name in ("wq_b", "wq_b + indexer.wq_b")}
    assert from_q["wq_b + indexer.wq_b"] == config.layer_kinds.count(LayerKind.CSA)
    assert sum(from_q.values()) == layers


def test_what_each_product_writes() -> None:
    """fp32 from x, for the compressors; NVFP4 between the experts' products; else bf16."""
    found = {one.name.split(" ")[0]: one.output for one in distinct_gemms(ModelConfig.from_dict(config_json(PRO)))}
    expected = {"wq_a": "fp32", "wq_b": "bf16", "wo_a": "bf16", "wo_b": "bf16", "experts.w1": "nvfp4"}
    assert found == expected | {"experts.w2": "bf16"}


def test_a_model_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tp-size 3"):
        distinct_gemms(ModelConfig.from_dict(config_json(FLASH)), 3)
    # One field each that 2 ranks do not divide, or not into whole blocks of 16.
    config = ModelConfig.from_dict(config_json(FLASH))
    for wrong, words in {
        replace(config, o_groups=3): "o_groups is 3, expected a multiple of 2",
        replace(config, num_attention_heads=7): "num_attention_heads is 7, expected a multiple of 2",
        replace(config, moe_intermediate_size=48): "moe_intermediate_size is 48, expected a multiple of 32",
    }.items():
        with pytest.raises(ConfigError, match=f"--tp-size 2: {words}"):
            Ownership(size=2).check(wrong)


def test_every_block_of_a_draft_has_its_gemms() -> None:
    found = draft_gemms(ModelConfig.from_dict(config_json(FLASH)), [], 3, Ownership())
    blocks = [{shard.stem.split(".ffn.")[0].split(".attn.")[0] for shard in gemm.shards} for gemm in found]
    assert blocks == [{f"mtp.{index}"} for index in range(3) for _ in range(len(found) // 3)]


def released(stem: str) -> OperandKind:
    """DeepSeek's releases: routed experts MXFP4, which arrives as NVFP4; compressors BF16; others FP8."""
    if ".ffn.experts." in stem:
        return "nvfp4"
    return "bf16" if "compressor" in stem else "fp8"


def test_hopper_merges_all_or_dequantises() -> None:
    config = ModelConfig.from_dict(config_json(FLASH))
    found = step_gemms(config, 2, released, rule=TOGETHER)
    kinds = {one.name: one.kind for one in found}
    assert kinds.pop("wq_a + wkv") == "fp8"
    assert {kind for name, kind in kinds.items() if "compressor" in name} == {"bf16"}
    assert {kinds[name] for name in ("wq_b", "wq_b + indexer.wq_b", "wo_a", "wo_b", "shared_experts.w2")} == {"fp8"}
    assert {kinds[name] for name in ("experts.w1 + w3", "experts.w2")} == {"nvfp4"}
    (up,) = (one for one in found if one.name == "shared_experts.w1 + w3")
    assert (up.features, up.k, up.gated, up.kind) == (2 * 2048 // 2, 4096, False, "fp8")
    assert {one.groups for one in found if one.experts_per_token} == {config.n_routed_experts}
    assert found[up] == len(config.layer_kinds)


def test_hopper_in_one_format_has_the_products_of_a_step() -> None:
    config = ModelConfig.from_dict(config_json(PRO))
    assert step_gemms(config, 4, lambda stem: "nvfp4") == step_gemms(config, 4, rule=TOGETHER)


def test_one_routed_expert_that_is_not_nvfp4_takes_its_layer_to_bf16() -> None:
    config = ModelConfig.from_dict(config_json(FLASH))
    found = step_gemms(
        config, 1, lambda stem: "fp8" if "layers.7.ffn.experts.200.w2" in stem else "nvfp4", rule=TOGETHER
    )
    assert {one.name: count for one, count in found.items() if one.kind == "bf16"} == {
        "experts.w1 + w3": 1,
        "experts.w2": 1,
    }


def test_a_gemm_knows_its_matrices_and_their_rows() -> None:
    config, ranks = ModelConfig.from_dict(config_json(FLASH)), 2
    shapes = {spec.name: spec.shape for spec in tensor_specs(config).values() if spec.role.is_matrix}
    found = [shard for gemm in launched_gemms(config, Ownership(size=ranks)) for shard in gemm.shards]
    assert sorted(shard.stem for shard in found) == sorted(shapes)
    for gemm in launched_gemms(config, Ownership(size=ranks)):
        assert sum(gemm.shard_rows) == gemm.rows * gemm.groups
        for shard, rows in zip(gemm.shards, gemm.shard_rows, strict=True):
            whole, k = shapes[shard.stem]
            assert rows == (whole // ranks if shard.rows else whole)
            assert gemm.k == (k // ranks if shard.cols else k)


def test_by_kind_each_kind_is_a_gemm_and_a_shared_expert_of_another_runs_apart() -> None:
    config = ModelConfig.from_dict(config_json(FLASH))
    layer = config.layer_kinds.index(LayerKind.CSA)
    here = f"layers.{layer}."
    found = [gemm for gemm in launched_gemms(config, kind_of=mxfp8) if gemm.shards[0].stem.startswith(here)]
    names = {gemm.name: (gemm.kind, gemm.gated) for gemm in found if gemm.output != "nvfp4"}
    assert names["wq_a + wkv"] == ("mxfp8", False)
    compressors = [f"{stem}compressor.{name}" for stem in ("", "indexer.") for name in ("wkv", "wgate")]
    assert names[" + ".join(compressors)] == ("bf16", False)
    assert names["shared_experts.w1 + w3"] == ("mxfp8", True)


def mxfp8(stem: str) -> OperandKind:
    """:func:`released` as SM100 multiplies it."""
    kind = released(stem)
    return "mxfp8" if kind == "fp8" else kind


def test_a_pass_that_scores_nothing_multiplies_no_index_queries() -> None:
    """What is left is the GEMM of a layer that has no index queries; others stay as they are."""
    found = launched_gemms(ModelConfig.from_dict(config_json(FLASH)))
    left = {without_index_queries(gemm) for gemm in found}
    assert left == {gemm for gemm in found if gemm.name != "wq_b + indexer.wq_b"} < set(found)
