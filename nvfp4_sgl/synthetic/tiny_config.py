"""config.json of tiny checkpoints, laid out as in DeepSeek's and ModelOpt's releases. Source: specification §1, §8.2.

Small where size is free, real where code depends on it: head_dim 512 with 64 rotated (so that 584-byte cache entries
are exercised), window 128, the three layer kinds, hash and top-k routing, 16 index heads (with few heads, index scores
tie at exactly zero).
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import Any

from nvfp4_sgl.checkpoint import modelopt_words
from nvfp4_sgl.config import ARCHITECTURE
from nvfp4_sgl.config_fields import READ, same
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import shown
from nvfp4_sgl.synthetic.tokenizer import BOS_ID, EOS_ID


class TinyFormat(enum.Enum):
    """Storage formats a tiny checkpoint can be written in."""

    NVFP4_FULL = "nvfp4-full"
    """Every large matrix of the decoder in NVFP4."""
    NVFP4_EXPERTS = "nvfp4-experts"
    """Routed experts in NVFP4, other matrices in FP8 128×128, compressors in bf16: ModelOpt's releases."""
    COMPRESSED_TENSORS = "compressed-tensors"
    """Routed experts in compressed-tensors' NVFP4, attention in its FP8_BLOCK, others in bf16."""
    DEEPSEEK = "deepseek"
    """DeepSeek's releases: routed experts in MXFP4, other matrices in FP8 128×128, compressors in bf16."""
    DEEPSEEK_BASE = "deepseek-base"
    """DeepSeek's "-Base" releases: FP8 128×128 with fp32 scales, experts included, compressors in bf16."""
    BF16 = "bf16"
    """The same weights before quantisation."""


class TinyDraft(enum.Enum):
    """Kinds of drafts of a tiny checkpoint, under ``mtp.``."""

    NONE = "none"
    MTP = "mtp"
    DSPARK = "dspark"


DSPARK_FIELDS = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 16,
    "dspark_noise_token_id": 2,
}
"""Fields of a tiny DSpark draft. It captures the last three layers, or all if there are fewer."""
DSPARK_STAGES, DSPARK_CAPTURED = 3, 3


class TinyNames(enum.Enum):
    """Names the tensors can have."""

    ORIGINAL = "original"
    TRANSFORMERS = "transformers"


BASE: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "num_hash_layers": 2,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 64,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "use_cache": True,
}

PRODUCER = {"name": "modelopt", "version": "0.47.0"}
_NVFP4_WEIGHTS = {
    **modelopt_words.FP4,
    "symmetric": True,
    "strategy": "tensor_group",
    "block_structure": None,
    "actorder": None,
}
_FP8_WEIGHTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "block",
    "block_structure": [128, 128],
    "group_size": None,
    "dynamic": False,
}
_ATTENTION_TARGETS = {
    TinyNames.ORIGINAL: [r"re:.*attn\.(wq_a|wq_b|wkv|wo_a|wo_b)$", r"re:.*attn\.indexer\.wq_b$"],
    TinyNames.TRANSFORMERS: [
        r"re:.*attn\.(q_a_proj|q_b_proj|kv_proj|o_a_proj|o_b_proj)$",
        r"re:.*attn\.compressor\.indexer\.q_b_proj$",
    ],
}
_EXPERT_TARGETS = {
    TinyNames.ORIGINAL: [r"re:.*ffn\..*w[123]$"],
    TinyNames.TRANSFORMERS: [r"re:.*mlp\..*(gate|up|down)_proj$"],
}


def bundled_draft(raw: Mapping[str, Any], format: TinyFormat) -> TinyDraft:
    """The draft that a tiny checkpoint with the config ``raw`` bundles under ``mtp.``."""
    if format is TinyFormat.COMPRESSED_TENSORS or not raw["num_nextn_predict_layers"]:
        return TinyDraft.NONE  # that format's exporter loads models through transformers, which drops drafts
    return TinyDraft.DSPARK if "dspark_block_size" in raw else TinyDraft.MTP


def tiny_config(
    format: TinyFormat,
    overrides: Mapping[str, Any],
    names: TinyNames = TinyNames.ORIGINAL,
    draft: TinyDraft | None = None,
) -> dict[str, Any]:
    """The config.json dictionary; ``overrides`` replace fields of :data:`BASE` or give ``compress_ratios``. It is the
    caller's: transformers, for one, adds to fields within.

    Without ``compress_ratios``, layers alternate window-only, CSA, HCA, CSA, HCA, …, with a 0 for each MTP block.
    """
    unknown = sorted(set(overrides) - set(BASE) - {"compress_ratios"})
    if unknown:
        raise ConfigError(f"tiny checkpoint: unknown field '{unknown[0]}'; known: compress_ratios, {', '.join(BASE)}")
    if format is TinyFormat.COMPRESSED_TENSORS and draft not in (None, TinyDraft.NONE):
        raise ConfigError(
            f"tiny checkpoint: draft {draft.value}: expected none, as exporters of {format.value} drop drafts; pass"
            " --draft none"
        )
    config = {**BASE, **overrides}
    if draft is not None:
        config["num_nextn_predict_layers"] = int(draft is not TinyDraft.NONE)
        _require_alike(draft, "num_nextn_predict_layers", overrides, config["num_nextn_predict_layers"])
    for field in ("num_hidden_layers", "num_nextn_predict_layers"):  # before anything is made by them
        _require(field, config[field], READ[field].takes(config[field]), str(READ[field]))
    layers, mtp = config["num_hidden_layers"], config["num_nextn_predict_layers"]
    ratios = config.get("compress_ratios", [0, *((4, 128)[i % 2] for i in range(layers - 1))])
    _require("compress_ratios", ratios, isinstance(ratios, list), "a list of integers")
    if draft is not None or "compress_ratios" not in overrides:
        of_draft = [0] * (DSPARK_STAGES if draft is TinyDraft.DSPARK else mtp)
        if draft is not None and ratios[layers:]:
            _require_alike(draft, "compress_ratios", overrides, ratios[:layers] + of_draft)
        ratios = ratios[:layers] + of_draft
    config["compress_ratios"] = ratios
    if draft is TinyDraft.DSPARK:
        config |= DSPARK_FIELDS | {"dspark_target_layer_ids": [*range(layers)][-DSPARK_CAPTURED:]}
    if mtp not in (0, 1):
        raise ConfigError(f"tiny checkpoint: num_nextn_predict_layers: expected 0 or 1, found {mtp}")
    if format is not TinyFormat.BF16:
        config["expert_dtype"] = "fp8" if format is TinyFormat.DEEPSEEK_BASE else "fp4"
        config["quantization_config"] = _quantization_config(format, names, layers)
    return copy.deepcopy(config)


def _require_alike(draft: TinyDraft, field: str, overrides: Mapping[str, Any], expected: object) -> None:
    """Refuse an override that says something else than ``draft`` does."""
    found = overrides.get(field, expected)
    _require(field, found, same(found, expected), f"{shown(expected)} with draft {draft.value}, or no value of its own")


def _require(field: str, value: object, fits: bool, expected: str) -> None:
    if not fits:
        raise ConfigError(f"tiny checkpoint: field '{field}': expected {expected}, found {shown(value)}")


def generation_config() -> dict[str, Any]:
    """generation_config.json of the releases."""
    return {
        "_from_model_config": True,
        "bos_token_id": BOS_ID,
        "do_sample": True,
        "eos_token_id": EOS_ID,
        "temperature": 1.0,
        "top_p": 1.0,
    }


def manifest(format: TinyFormat, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The hf_quant_config.json that ModelOpt writes beside ``config``."""
    if format not in (TinyFormat.NVFP4_FULL, TinyFormat.NVFP4_EXPERTS):
        return None
    return modelopt_words.manifest(config["quantization_config"])


def _quantization_config(format: TinyFormat, names: TinyNames, layers: int) -> dict[str, Any]:
    theirs = names is TinyNames.TRANSFORMERS
    if format is TinyFormat.NVFP4_FULL:
        return modelopt_words.full(PRODUCER)
    if format is TinyFormat.COMPRESSED_TENSORS:
        return {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": {
                "attention": _compressed_group(_ATTENTION_TARGETS[names], _FP8_WEIGHTS, "float-quantized"),
                "experts": _compressed_group(_EXPERT_TARGETS[names], _NVFP4_WEIGHTS, "nvfp4-pack-quantized"),
            },
            "ignore": ["lm_head", "re:.*shared_experts.*"],
        }
    if format is not TinyFormat.NVFP4_EXPERTS:
        return dict(modelopt_words.FP8_BLOCKS)
    attention, feed_forward = ("self_attn", "mlp") if theirs else ("attn", "ffn")
    prefix, head = ("model.", "lm_head") if theirs else ("", "head")
    return modelopt_words.mixed(
        base=modelopt_words.FP8_BLOCKS,
        nvfp4=[f"{prefix}layers.{layer}.{feed_forward}.experts" for layer in range(layers)],
        ignore=[f"*.{attention}.*", f"*.{feed_forward}.shared_experts.*", head, f"{prefix}mtp.*"],
        is_moe_nvfp4=True,
        producer=PRODUCER,
    )


def _compressed_group(targets: list[str], weights: dict[str, Any], format: str) -> dict[str, Any]:
    inputs = modelopt_words.FP4 | {"dynamic": "local", "strategy": "tensor_group"} if weights["num_bits"] == 4 else None
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": format,
    }
