"""The DeepSeek-V4 architecture as config.json states it, parsed once and checked.

Everything below this module (references, weights, caches, serving) takes a :class:`ModelConfig` and never
looks at a raw dictionary. Only DeepSeek's original layout of config.json is read: a directory written by
``transformers.save_pretrained`` has lost ``compress_ratios`` and is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import MAX_CONFIG_BYTES, read_json, require_directory, require_finished, shown

ARCHITECTURE = "DeepseekV4ForCausalLM"
MAX_DIMENSION = 2**31 - 1
MAX_NUMBER = 3.0e38
MAX_LAYERS = 1024
MAX_EXPERTS = 4096
"""Beyond these config.json is damaged; Pro has 61 layers of 384 experts. They bound what is built before files are
looked at."""
DSPARK_STAGES = 8
"""Most draft stages of a DSpark release that ``compress_ratios`` may have entries for; Flash-0731 has three."""


class LayerKind(enum.Enum):
    """Attention variant of a layer, by its entry in ``compress_ratios``."""

    SWA = 0
    """Sliding window only."""
    CSA = 4
    """Window plus entries that compress 4 tokens, selected by the lightning indexer."""
    HCA = 128
    """Window plus every entry that compresses 128 tokens."""


@dataclass(frozen=True)
class YarnConfig:
    """YaRN parameters of the compressed layers' RoPE (``rope_scaling``)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and constants of one DeepSeek-V4 decoder. Field names are config.json's."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    num_hash_layers: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnConfig
    max_position_embeddings: int
    num_nextn_predict_layers: int
    layer_kinds: tuple[LayerKind, ...]

    def kind(self, layer: int) -> LayerKind:
        """Attention variant of layer ``layer`` (0-based)."""
        return self.layer_kinds[layer]

    def is_hash_routed(self, layer: int) -> bool:
        """Whether the experts of layer ``layer`` are chosen by token id."""
        return layer < self.num_hash_layers

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Parse ``path/config.json``; :class:`ConfigError` if it is absent, not JSON or not servable."""
        return cls.from_dict(read_config_json(path), source=str(Path(path) / "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
        """Parse and check a config.json dictionary; ``source`` names it in errors."""
        return _Parser(raw, source).parse()


def names_architecture(value: object) -> bool:
    """Whether ``architectures`` of a config.json, whatever it is, names ours."""
    return isinstance(value, list) and ARCHITECTURE in value


def read_config_json(path: str | Path) -> dict[str, Any]:
    """The dictionary in ``path/config.json``."""
    file = require_directory(path, ConfigError) / "config.json"
    require_finished(file.parent, ConfigError)
    raw = read_json(file, ConfigError, MAX_CONFIG_BYTES, "--model-path must name a directory that holds config.json")
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(raw).__name__}")
    return raw


class _Parser:
    """Reads fields with types and ranges; every complaint names the file and the field."""

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.raw, self.source = raw, source

    def fail(self, field: str, expected: str) -> ConfigError:
        found = shown(self.raw[field]) if field in self.raw else "nothing"
        return ConfigError(f"{self.source}: field '{field}': expected {expected}, found {found}")

    def integer(self, field: str, minimum: int = 1, maximum: int = MAX_DIMENSION) -> int:
        value = self.raw.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise self.fail(field, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, field: str) -> float:
        value = self.raw.get(field)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_NUMBER:
            raise self.fail(field, "a number > 0 that fp32 can hold")
        return float(value)

    def require(self, field: str, expected: object) -> None:
        if self.raw.get(field, expected) != expected:
            raise self.fail(field, f"{expected!r} (nothing else is implemented)")

    def layer_kinds(self, layers: int) -> tuple[LayerKind, ...]:
        ratios = self.raw.get("compress_ratios")
        if ratios is None:
            hint = (
                " This looks like a directory written by transformers' save_pretrained, which loses it:"
                " use the original release or convert from it."
                if {"layer_types", "mlp_layer_types", "rope_parameters"} & set(self.raw)
                else ""
            )
            raise ConfigError(
                f"{self.source}: field 'compress_ratios' is missing; expected a list with one of 0, 4 or 128"
                f" for each of the {layers} layers (and one for each MTP layer).{hint}"
            )
        known = {kind.value: kind for kind in LayerKind}
        if not isinstance(ratios, list) or any(type(r) is not int or r not in known for r in ratios):
            raise self.fail("compress_ratios", "a list of 0, 4 and 128")
        # Releases have one entry for their draft layer, or none, whatever num_nextn_predict_layers says.
        most = layers + max(self.draft_layers(), DSPARK_STAGES if self.has_dspark() else 1)
        if not layers <= len(ratios) <= most:
            raise ConfigError(
                f"{self.source}: field 'compress_ratios': expected {layers} entries (one a layer) to {most} (with"
                f" draft layers), found {len(ratios)}"
            )
        return tuple(known[r] for r in ratios[:layers])

    def has_dspark(self) -> bool:
        """Whether the release bundles a DSpark draft, whose stages num_nextn_predict_layers does not count."""
        return any(field.startswith("dspark_") for field in self.raw)

    def draft_layers(self) -> int:
        """``num_nextn_predict_layers``, which may be absent."""
        present = "num_nextn_predict_layers" in self.raw
        return self.integer("num_nextn_predict_layers", 0, MAX_LAYERS) if present else 0

    def yarn(self) -> YarnConfig:
        scaling = self.raw.get("rope_scaling")
        if not isinstance(scaling, dict) or scaling.get("type", scaling.get("rope_type")) != "yarn":
            raise self.fail("rope_scaling", "an object with type 'yarn'")
        inner = _Parser(scaling, f"{self.source}: rope_scaling")
        return YarnConfig(
            factor=inner.number("factor"),
            original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
            beta_fast=inner.number("beta_fast"),
            beta_slow=inner.number("beta_slow"),
        )

    def parse(self) -> ModelConfig:
        architectures = self.raw.get("architectures")
        if architectures is not None and not names_architecture(architectures):
            raise self.fail("architectures", f"a list with '{ARCHITECTURE}'")
        for field, expected in (
            ("num_key_value_heads", 1),
            ("n_shared_experts", 1),
            ("scoring_func", "sqrtsoftplus"),
            ("topk_method", "noaux_tc"),
            ("norm_topk_prob", True),
            ("tie_word_embeddings", False),
            ("hidden_act", "silu"),
            ("attention_bias", False),
        ):
            self.require(field, expected)
        layers = self.integer("num_hidden_layers", maximum=MAX_LAYERS)
        kinds = self.layer_kinds(layers)  # first: what transformers' save_pretrained loses beside it needs no mention
        config = ModelConfig(
            vocab_size=self.integer("vocab_size"),
            hidden_size=self.integer("hidden_size"),
            num_hidden_layers=layers,
            num_attention_heads=self.integer("num_attention_heads"),
            head_dim=self.integer("head_dim"),
            qk_rope_head_dim=self.integer("qk_rope_head_dim"),
            q_lora_rank=self.integer("q_lora_rank"),
            o_groups=self.integer("o_groups"),
            o_lora_rank=self.integer("o_lora_rank"),
            sliding_window=self.integer("sliding_window"),
            moe_intermediate_size=self.integer("moe_intermediate_size"),
            n_routed_experts=self.integer("n_routed_experts", maximum=MAX_EXPERTS),
            num_experts_per_tok=self.integer("num_experts_per_tok"),
            routed_scaling_factor=self.number("routed_scaling_factor"),
            swiglu_limit=self.number("swiglu_limit"),
            num_hash_layers=self.integer("num_hash_layers", 0),
            index_n_heads=self.integer("index_n_heads"),
            index_head_dim=self.integer("index_head_dim"),
            index_topk=self.integer("index_topk"),
            hc_mult=self.integer("hc_mult"),
            hc_sinkhorn_iters=self.integer("hc_sinkhorn_iters"),
            hc_eps=self.number("hc_eps"),
            rms_norm_eps=self.number("rms_norm_eps"),
            rope_theta=self.number("rope_theta"),
            compress_rope_theta=self.number("compress_rope_theta"),
            yarn=self.yarn(),
            max_position_embeddings=self.integer("max_position_embeddings"),
            num_nextn_predict_layers=self.draft_layers(),
            layer_kinds=kinds,
        )
        self.check_relations(config)
        return config

    def check_relations(self, config: ModelConfig) -> None:
        for field, divisor, why in (
            ("num_attention_heads", config.o_groups, "o_groups"),
            ("hidden_size", 16, "the NVFP4 block"),
            ("moe_intermediate_size", 16, "the NVFP4 block"),
            ("q_lora_rank", 16, "the NVFP4 block"),
            ("o_lora_rank", 16, "the NVFP4 block"),
            ("qk_rope_head_dim", 2, "a RoPE pair"),
        ):
            if getattr(config, field) % divisor:
                raise self.fail(field, f"a multiple of {divisor} ({why})")
        if config.qk_rope_head_dim > min(config.head_dim, config.index_head_dim):
            raise self.fail("qk_rope_head_dim", "at most head_dim and index_head_dim")
        if config.num_experts_per_tok > config.n_routed_experts:
            raise self.fail("num_experts_per_tok", f"at most n_routed_experts ({config.n_routed_experts})")
