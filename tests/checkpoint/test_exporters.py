"""The words of exporters: those of published checkpoints are understood, others are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.checkpoint.quantization import MANIFEST, check_quantization_config
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import read_config_json
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, TinyNames
from tests.support.damage import copy_checkpoint

SIZES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 8}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
"""DeepSeek's own."""
EXPERTS_ALONE = {f"layers.{layer}.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16} for layer in range(3)}
EACH_EXPERT = {
    f"layers.{layer}.ffn.experts.{expert}.{w}": {"quant_algo": "NVFP4", "awq_block_size": 16}
    for layer in range(3)
    for expert in range(8)
    for w in ("w1", "w2", "w3")
}
EXCLUDED = [
    *("*.attn.*", "*.attn_norm.*", "*.ffn.shared_experts.*", "*.ffn.gate.*", "*.ffn_norm.*", "embed.weight"),
    *("head.weight", "*.hc_*", "*.h_proj.*", "*.e_proj.*", "*.enorm.*", "*.hnorm.*", "mtp.*.norm.*", "norm.weight"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, found = tmp_path_factory.mktemp("exporters"), {}
    for format in TinyFormat:
        for names in TinyNames:
            key = format.value if names is TinyNames.ORIGINAL else f"{format.value}, {names.value}"
            found[key] = root / key
            write_tiny(found[key], format, seed=2, names=names, **SIZES)
    return found


@pytest.fixture(scope="module")
def summaries(checkpoints: dict[str, Path]) -> dict[str, CheckpointSummary]:
    return {key: verify(directory).summary for key, directory in checkpoints.items()}


PUBLISHED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek, experts named": ("deepseek", {"expert_dtype": "fp4", "quantization_config": FP8}),
    "DeepSeek, earliest Flash": ("deepseek", {"quantization_config": FP8}),
    "Base": ("deepseek-base", {"expert_dtype": "fp8", "quantization_config": FP8}),
    "NVIDIA, first revision": (
        "nvfp4-experts",
        {"expert_dtype": "fp4", "quantization_config": {**FP8, "moe_quant_algo": "NVFP4"}},
    ),
    "transformers' names of modules": (
        "nvfp4-experts, transformers",
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.{layer}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for layer in range(3)
                }
                | {"model.layers.1.self_attn.o_a_proj": {"quant_algo": "FP8"}},
                "exclude_modules": ["model.layers.0.self_attn*", "lm_head"],
            }
        },
    ),
    "full, by transformers' names": (
        "nvfp4-full, transformers",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}},
    ),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_words_are_understood(case: str, summaries: dict[str, CheckpointSummary]) -> None:
    format, config = PUBLISHED[case]
    check_quantization_config(config, summaries[format])


@pytest.mark.parametrize("key", ["nvfp4-full", "nvfp4-experts", "compressed-tensors", "deepseek", "deepseek-base"])
def test_names_in_patterns_need_not_be_those_in_the_files(
    key: str, checkpoints: dict[str, Path], summaries: dict[str, CheckpointSummary]
) -> None:
    """Renamed files keep their exporter's patterns."""
    check_quantization_config(read_config_json(checkpoints[key]), summaries[f"{key}, transformers"])
    check_quantization_config(read_config_json(checkpoints[f"{key}, transformers"]), summaries[key])


def with_change(base: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    changed = deepcopy(base)
    inner = changed
    *parents, last = path.split("/")
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    return changed


REFUSED: Mapping[str, tuple[str, str, object, str]] = {
    "unknown field": ("compressed-tensors", "rotation", True, r"quantization_config\.rotation"),
    "transform": (
        "compressed-tensors",
        "transform_config",
        {"config_groups": {"u": {}}},
        r"transform_config.*rotated",
    ),
    "sparsity": ("compressed-tensors", "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
    "status": ("compressed-tensors", "quantization_status", "frozen", "quantization_status.*compressed.*'frozen'"),
    "format": ("compressed-tensors", "format", "pack-quantized", "format.*nvfp4-pack-quantized.*'pack-quantized'"),
    "no groups": ("compressed-tensors", "config_groups", {}, "config_groups.*a group for each scheme"),
    "groups that are none": ("compressed-tensors", "config_groups", [], "config_groups.*an object"),
    "group's field": ("compressed-tensors", "config_groups/experts/hadamard", 1, r"config_groups\.experts\.hadamard"),
    "group's format": (
        "compressed-tensors",
        "config_groups/experts/format",
        "marlin-24",
        r"experts\.format.*'marlin-24'",
    ),
    "argument": ("compressed-tensors", "config_groups/experts/weights/scale_shift", 1, r"weights\.scale_shift"),
    "bits": (
        "compressed-tensors",
        "config_groups/experts/weights/num_bits",
        3,
        r"experts\.weights.*NVFP4 \(num_bits 4",
    ),
    "integers": ("compressed-tensors", "config_groups/experts/weights/type", "int", r"weights\.type.*float.*'int'"),
    "group size": ("compressed-tensors", "config_groups/experts/weights/group_size", 64, r"experts\.weights.*16"),
    "act order": (
        "compressed-tensors",
        "config_groups/experts/weights/actorder",
        "group",
        r"weights\.actorder.*'group'",
    ),
    "asymmetric": ("compressed-tensors", "config_groups/experts/weights/symmetric", False, r"weights\.symmetric"),
    "blocks": (
        "compressed-tensors",
        "config_groups/attention/weights/block_structure",
        [64, 64],
        r"attention\.weights.*\[128, 128\]",
    ),
    "outputs": ("compressed-tensors", "config_groups/experts/output_activations", {}, r"output_activations.*nothing"),
    "inputs": (
        "compressed-tensors",
        "config_groups/experts/input_activations/smooth",
        1,
        r"input_activations\.smooth",
    ),
    "expression": (
        "compressed-tensors",
        "config_groups/experts/targets",
        ["re:(("],
        r"experts\.targets.*regular expressions",
    ),
    "targets": ("compressed-tensors", "config_groups/experts/targets", "Linear", r"experts\.targets.*list of patterns"),
    "cache": ("compressed-tensors", "kv_cache_scheme", {"num_bits": 4}, "kv_cache_scheme.*num_bits 8"),
    "layer's field": (
        "nvfp4-experts",
        "quantized_layers/layers.1.ffn.experts/pre_quant_scale",
        True,
        r"layers\.1\.ffn\.experts\.pre_quant_scale",
    ),
    "layer's algorithm": (
        "nvfp4-experts",
        "quantized_layers/layers.1.ffn.experts/quant_algo",
        "W4A8_AWQ",
        r"layers\.1\.ffn\.experts'.*W4A8_AWQ",
    ),
    "scale format": ("deepseek", "scale_fmt", "float", "scale_fmt.*ue8m0"),
    "block size": ("deepseek", "weight_block_size", [32, 32], r"weight_block_size.*\[128, 128\]"),
    "rotation": ("nvfp4-experts", "rotate", True, r"quantization_config\.rotate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_words_that_are_not_known_are_refused_by_name(
    case: str, checkpoints: dict[str, Path], summaries: dict[str, CheckpointSummary]
) -> None:
    format, path, value, message = REFUSED[case]
    raw = read_config_json(checkpoints[format])
    raw["quantization_config"] = with_change(raw["quantization_config"], path, value)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check_quantization_config(raw, summaries[format])


CONTRADICTED: Mapping[str, tuple[str, str, object, str]] = {
    "ignored, but quantised": (
        "compressed-tensors",
        "ignore",
        ["re:.*shared_experts.*", "re:.*experts.5.w1$"],
        r"ignore': expected 'layers\.0\.ffn\.experts\.5\.w1\.weight' in plain",
    ),
    "quantised by a group, but not": (
        "compressed-tensors",
        "ignore",
        [],
        r"config_groups\.experts': expected 'layers\.0\.ffn\.shared_experts\.w1\.weight' in NVFP4",
    ),
    "in no group, but quantised": (
        "compressed-tensors",
        "config_groups/attention/targets",
        [r"re:.*attn\.wq_a$"],
        r"config_groups': expected 'layers\.\d\.attn\.wq_b\.weight' in plain",
    ),
    "in the wrong group": (
        "compressed-tensors",
        "config_groups/attention/targets",
        ["Linear"],
        r"config_groups\.attention': expected '.*' in FP8",
    ),
    "experts that are not MXFP4": ("nvfp4-experts", "moe_quant_algo", "MXFP4", "moe_quant_algo.*in MXFP4.*NVFP4"),
    "a group without its exceptions": (
        "nvfp4-experts",
        "ignore",
        ["*.ffn.shared_experts.*"],
        r"config_groups\.group_0': expected '.*attn.*' in NVFP4",
    ),
    "ModelOpt's experts ignored": (
        "nvfp4-experts",
        "ignore",
        ["*.attn.*", "*.ffn.shared_experts.*", "layers.1.ffn.experts"],
        r"ignore': expected 'layers\.1\.ffn\.experts\.0",
    ),
    "what is left out of MXFP4": ("deepseek", "moe_quant_algo", "NVFP4", "moe_quant_algo.*in NVFP4.*MXFP4"),
    "whose words they are": ("compressed-tensors", "quant_method", "modelopt", "'quantization_config"),
}


@pytest.mark.parametrize("case", CONTRADICTED)
def test_words_that_contradict_the_tensors_are_refused(
    case: str, checkpoints: dict[str, Path], summaries: dict[str, CheckpointSummary]
) -> None:
    format, path, value, message = CONTRADICTED[case]
    raw = read_config_json(checkpoints[format])
    raw["quantization_config"] = with_change(raw["quantization_config"], path, value)
    with pytest.raises(ConfigError, match=message):
        check_quantization_config(raw, summaries[format])


def test_expert_dtype_is_held_against_the_experts(summaries: dict[str, CheckpointSummary]) -> None:
    for dtype, format in (("fp8", "deepseek"), ("fp4", "deepseek-base")):
        with pytest.raises(ConfigError, match=rf"expert_dtype.*experts\.0.*the field is '{dtype}'"):
            check_quantization_config({"expert_dtype": dtype, "quantization_config": FP8}, summaries[format])


def manifest(**inner: Any) -> dict[str, Any]:
    return {"producer": {"name": "modelopt", "version": "dsv4-nvfp4-experts"}, "quantization": inner}


MANIFESTS: Mapping[str, tuple[dict[str, Any], str | None]] = {
    "first revision": (
        manifest(quant_algo=None, kv_cache_quant_algo=None, quantized_layers=EACH_EXPERT, exclude_modules=EXCLUDED),
        None,
    ),
    "later revision": (
        manifest(
            quant_algo="MIXED_PRECISION",
            kv_cache_quant_algo=None,
            group_size=16,
            quantized_layers=EXPERTS_ALONE,
            exclude_modules=["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"],
        ),
        None,
    ),
    "flat": ({"quant_algo": "MIXED_PRECISION", "quantized_layers": EXPERTS_ALONE, "ignore": []}, None),
    "says that all is NVFP4": (manifest(quant_algo="NVFP4", exclude_modules=["head"]), r"hf_quant_config.*in NVFP4"),
    "excludes experts": (
        manifest(quant_algo="MIXED_PRECISION", quantized_layers={}, exclude_modules=["*.experts.3.*"]),
        r"hf_quant_config\.json.*exclude_modules': expected 'layers\.0\.ffn\.experts\.3",
    ),
    "unknown word": (manifest(quant_algo="NVFP4", has_rotation=True), r"hf_quant_config\.json.*has_rotation"),
    "no object": ({"quantization": []}, r"hf_quant_config\.json.*an object"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_the_manifest_of_modelopt_is_held_against_the_tensors(
    case: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    content, refused = MANIFESTS[case]
    directory = copy_checkpoint(checkpoints["nvfp4-experts"], tmp_path / "copy")
    (directory / MANIFEST).unlink()
    (directory / MANIFEST).write_text(json.dumps(content))
    if refused is None:
        assert verify(directory).summary.format == "nvfp4-experts"
        return
    with pytest.raises(ConfigError, match=f"(?s){refused}"):
        verify(directory)


def test_thousands_of_listed_matrices_take_no_time(summaries: dict[str, CheckpointSummary]) -> None:
    """Every matrix by name and a long list of exceptions: nothing is compared pair by pair."""
    import time

    ignored = [f"layers.{layer}.attn.nothing_{index}" for layer in range(60) for index in range(1000)]
    raw = {**FP8, "quant_algo": "MIXED_PRECISION", "quantized_layers": EACH_EXPERT, "ignore": ignored}
    started = time.monotonic()
    check_quantization_config({"quantization_config": raw}, summaries["nvfp4-experts"])
    assert time.monotonic() - started < 2
