"""``quantization_config`` and hf_quant_config.json as ModelOpt writes them.

What is written here is understood by :mod:`.exporters`. Source: specification §8.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NOT_QUANTIZED = ("embed", "head", "*.gate", "*.indexer.weights_proj")
"""What stays as it is even where every large matrix is NVFP4."""
DRAFTS = "mtp.*"
"""Pattern of what drafts hold, which is not quantised unless somebody asks for it."""

FP4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_GROUPS = {"group_0": {"input_activations": FP4, "weights": FP4, "targets": ["Linear"]}}

FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""DeepSeek's words for its releases, which ModelOpt adds to."""


def full(producer: Mapping[str, str], drafts: Sequence[str] = (DRAFTS,)) -> dict[str, Any]:
    """Every large matrix is NVFP4.

    Args:
        drafts: patterns of what is not in drafts.
    """
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "config_groups": _GROUPS,
        "ignore": [*NOT_QUANTIZED, *drafts],
        "producer": dict(producer),
    }


def mixed(
    *,
    base: Mapping[str, Any],
    nvfp4: Iterable[str],
    ignore: list[str],
    is_moe_nvfp4: bool,
    producer: Mapping[str, str],
) -> dict[str, Any]:
    """Some matrices are NVFP4.

    Args:
        base: words for the others, :data:`FP8_BLOCKS` or no more than a ``quant_method``.
        nvfp4: modules that are NVFP4.
        ignore: patterns of everything that is not.
        is_moe_nvfp4: all routed experts are.
    """
    return {
        **base,
        "quant_algo": "MIXED_PRECISION",
        **({"moe_quant_algo": "NVFP4"} if is_moe_nvfp4 else {}),
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "config_groups": _GROUPS,
        "ignore": ignore,
        "quantized_layers": {name: {"quant_algo": "NVFP4", "group_size": 16} for name in nvfp4},
        "producer": dict(producer),
    }


def manifest(said: Mapping[str, Any]) -> dict[str, Any]:
    """hf_quant_config.json beside a ``quantization_config`` of :func:`full` or :func:`mixed`."""
    fields = ("quant_algo", "kv_cache_quant_algo", "group_size", "quantized_layers")
    inner = {field: said[field] for field in fields if field in said} | {"exclude_modules": said["ignore"]}
    return {"producer": said["producer"], "quantization": inner}
