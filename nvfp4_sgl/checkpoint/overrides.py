"""Fields of config.json replaced on the command line, and the fields that follow from them.

Only random weights follow: the tensors of a checkpoint have the sizes that its own config.json gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from nvfp4_sgl.checkpoint.transformers_names import PREFIX
from nvfp4_sgl.errors import ConfigError

SIZES = (
    *("num_hidden_layers", "compress_ratios", "num_hash_layers"),
    *("hidden_size", "moe_intermediate_size", "n_routed_experts", "num_experts_per_tok"),
    *("num_attention_heads", "q_lora_rank", "o_groups", "o_lora_rank", "index_n_heads", "index_topk"),
    "quantization_config",
)
"""Fields that can be replaced where weights are random. The others belong to the tokenizer or to SGLang's pools."""

FLAG = "--json-model-override-args"


def completed(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``overrides`` of config.json ``raw``, and the fields that a smaller ``num_hidden_layers`` cuts.

    ``compress_ratios`` keeps those of the first layers and of draft layers, ``num_hash_layers`` is at most the number
    of layers, and ``quantization_config.quantized_layers`` loses the layers that are gone. ``compress_ratios`` that are
    overridden themselves stay as they are given.

    Raises:
        ConfigError: more layers than config.json has, without ``compress_ratios`` for them.
    """
    result, had = dict(overrides), raw.get("num_hidden_layers")
    layers = result.get("num_hidden_layers", had)
    if not _is_count(layers) or not _is_count(had) or layers == had:
        return result  # what is no number is refused where config.json is parsed
    ratios = raw.get("compress_ratios")
    if "compress_ratios" not in result and isinstance(ratios, list):
        if layers > had:
            raise ConfigError(
                f"{FLAG}: num_hidden_layers {layers}: config.json has {had} layers; expected compress_ratios for all"
                f" {layers} in the same flag, or at most {had} layers"
            )
        result["compress_ratios"] = ratios[:layers] + ratios[had:]
    hashed = result.get("num_hash_layers", raw.get("num_hash_layers"))
    if _is_count(hashed):
        result["num_hash_layers"] = min(hashed, layers)
    quantization = result.get("quantization_config", raw.get("quantization_config"))
    listed = quantization.get("quantized_layers") if isinstance(quantization, Mapping) else None
    if isinstance(quantization, Mapping) and isinstance(listed, Mapping):
        kept = {name: said for name, said in listed.items() if _layer(name) < layers}
        result["quantization_config"] = {**quantization, "quantized_layers": kept}
    return result


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _layer(name: str) -> int:
    """The layer of a name such as ``layers.7.ffn`` or ``model.layers.7.mlp``; -1 for others."""
    parts = name.removeprefix(PREFIX).split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 and parts[1].isdecimal() else -1
