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

from nvfp4_sgl.config_fields import DSPARK, FIXED, READ, REPEATS, Number, same
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.files import MAX_CONFIG_BYTES, read_json, require_directory, require_file, require_finished, shown
from nvfp4_sgl.formats.blocks import NVFP4
from nvfp4_sgl.rope_fields import RopeSaid, YarnConfig, check_parameters, read_yarn

ARCHITECTURE = "DeepseekV4ForCausalLM"
WITHOUT_CONFIG = "name a directory that holds config.json"
"""What to do where there is none."""
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

    @property
    def overlap(self) -> int:
        """Tokens in front of a window of the compressor that its entry is made of, too."""
        return self.value if self is LayerKind.CSA else 0

    @property
    def keeps_state_by_page(self) -> bool:
        """Whether the compressor's raw rows belong to a page of window rows rather than to a request."""
        return self is LayerKind.CSA


class RopeTable(enum.Enum):
    """The RoPE frequencies of a layer (specification §3.2)."""

    WINDOW = "window"
    """``rope_theta``: layers without compressed entries."""
    COMPRESSED = "compressed"
    """``compress_rope_theta`` with YaRN: layers with compressed entries, their window included."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer, by what differs between layers; a draft's block is one, too.

    Attributes:
        index: its number, from 0.
        stem: what the names of its tensors begin with, such as ``layers.3``.
        kind: its attention.
        hash_routed: whether its experts are chosen by token id.
    """

    index: int
    stem: str
    kind: LayerKind
    hash_routed: bool

    @property
    def ratio(self) -> int:
        """Tokens that an entry compresses; 0 without entries."""
        return self.kind.value

    @property
    def compresses(self) -> bool:
        """Whether it attends to compressed entries."""
        return self.kind is not LayerKind.SWA

    @property
    def selects(self) -> bool:
        """Whether an indexer selects the entries of each query, which otherwise sees all of them."""
        return self.kind is LayerKind.CSA

    @property
    def rope(self) -> RopeTable:
        return RopeTable.COMPRESSED if self.compresses else RopeTable.WINDOW


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

    def layer(self, index: int) -> LayerSpec:
        """Layer ``index`` (0-based)."""
        return LayerSpec(index, f"layers.{index}", self.kind(index), self.is_hash_routed(index))

    def layers(self, stage: range | None = None) -> list[LayerSpec]:
        """The layers of a stage of the decoder, all unless given."""
        return [self.layer(index) for index in self.stage(stage)]

    def stage(self, layers: range | None) -> range:
        """``layers``, all of the decoder's unless given; ValueError unless they are some of these, in order."""
        every = range(self.num_hidden_layers)
        if layers is None:
            return every
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= every.stop:
            raise ValueError(f"layers {layers}: expected some of {every}, in order")
        return layers

    def draft_layer(self, index: int) -> LayerSpec:
        """Block ``index`` of a draft, MTP's or a stage of DSpark: window only, routed by scores."""
        return LayerSpec(self.num_hidden_layers + index, f"mtp.{index}", LayerKind.SWA, False)

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Parse ``path/config.json``; :class:`ConfigError` if it is absent, not JSON or not servable."""
        return cls.from_dict(read_config_json(path), source=str(Path(path) / "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
        """Parse and check a config.json dictionary; ``source`` names it in errors."""
        return _Parser(raw, source).parse()


DRAFT_ARCHITECTURE = "DeepseekV4ForCausalLMNextN"
"""What SGLang calls the MTP draft of a checkpoint of :data:`ARCHITECTURE`."""
DSPARK_ARCHITECTURE = "DeepseekV4ForCausalLMDSpark"
"""What it calls the DSpark draft."""


def require_checkpoint(path: str | Path) -> Path:
    """``path/config.json``, which must be a file; it is not read.

    Raises:
        ConfigError: ``path`` is no directory, one of the Hugging Face cache that is no snapshot, an unfinished
            conversion, or a directory without config.json.
    """
    directory = require_directory(path, ConfigError)
    require_finished(directory, ConfigError)
    require_file(directory / "config.json", ConfigError, WITHOUT_CONFIG)
    return directory / "config.json"


def read_config_json(path: str | Path) -> dict[str, Any]:
    """The dictionary in ``path/config.json``."""
    file = require_checkpoint(path)
    raw = read_json(file, ConfigError, MAX_CONFIG_BYTES, WITHOUT_CONFIG)
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(raw).__name__}; fetch it again")
    return raw


class _Parser:
    """Reads fields by the table of :mod:`.config_fields`; every complaint names the file and the field."""

    def __init__(self, raw: Mapping[str, Any], source: str):
        self.raw, self.source = raw, source

    def fail(self, field: str, expected: str) -> ConfigError:
        found = shown(self.raw[field]) if field in self.raw else "nothing"
        return ConfigError(f"{self.source}: field '{field}': expected {expected}, found {found}")

    def integer(self, field: str) -> int:
        return int(self.read(field))

    def number(self, field: str) -> float:
        return float(self.read(field))

    def read(self, field: str) -> int | float:
        """A number within its bounds."""
        rule, value = READ[field], self.raw.get(field)
        if not rule.takes(value):
            raise self.fail(field, f"{rule} ({rule.reason})")
        assert isinstance(value, int | float)
        return value

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
                f" draft layers), found {len(ratios)}; use the config.json of the release"
            )
        return tuple(known[r] for r in ratios[:layers])

    def has_dspark(self) -> bool:
        """Whether the release bundles a DSpark draft, whose stages num_nextn_predict_layers does not count."""
        return any(field.startswith(DSPARK) for field in self.raw)

    def draft_layers(self) -> int:
        """``num_nextn_predict_layers``, which may be absent."""
        present = "num_nextn_predict_layers" in self.raw
        return self.integer("num_nextn_predict_layers") if present else 0

    def check_fixed(self) -> None:
        """Refuse another architecture, and fields that say what is not implemented."""
        architectures = self.raw.get("architectures")
        if not isinstance(architectures, list) or architectures[:1] != [ARCHITECTURE]:
            raise self.fail("architectures", f"a list that begins with '{ARCHITECTURE}'")
        for field, rule in FIXED.items():
            if not rule.takes(self.raw.get(field, rule.values[0])):
                raise self.fail(field, f"{rule} ({rule.reason}; nothing else is implemented)")
        if "model_type" not in self.raw:
            raise self.fail("model_type", str(FIXED["model_type"]))

    def parse(self) -> ModelConfig:
        self.check_fixed()
        layers = self.integer("num_hidden_layers")
        kinds = self.layer_kinds(layers)  # first: what transformers' save_pretrained loses beside it needs no mention
        numbers: dict[str, Any] = {
            field: self.number(field) if isinstance(rule, Number) else self.integer(field)
            for field, rule in READ.items()
            if field != "num_nextn_predict_layers"
        }
        said = RopeSaid(
            numbers["rope_theta"],
            numbers["compress_rope_theta"],
            numbers["qk_rope_head_dim"] / numbers["head_dim"],
        )
        yarn = read_yarn(self.raw.get("rope_scaling"), self.source, said)
        config = ModelConfig(**numbers, yarn=yarn, num_nextn_predict_layers=self.draft_layers(), layer_kinds=kinds)
        self.check_relations(config)
        check_parameters(self.raw.get("rope_parameters"), self.source, yarn, said)
        self.check_repeated(config)
        return config

    def check_relations(self, config: ModelConfig) -> None:
        for field, divisor, why in (
            ("num_attention_heads", config.o_groups, "o_groups"),
            ("hidden_size", NVFP4.columns, "the NVFP4 block"),
            ("moe_intermediate_size", NVFP4.columns, "the NVFP4 block"),
            ("q_lora_rank", NVFP4.columns, "the NVFP4 block"),
            ("o_lora_rank", NVFP4.columns, "the NVFP4 block"),
            ("qk_rope_head_dim", 2, "a RoPE pair"),
        ):
            if getattr(config, field) % divisor:
                raise self.fail(field, f"a multiple of {divisor} ({why})")
        if config.qk_rope_head_dim > min(config.head_dim, config.index_head_dim):
            raise self.fail("qk_rope_head_dim", "at most head_dim and index_head_dim")
        if config.num_experts_per_tok > config.n_routed_experts:
            raise self.fail("num_experts_per_tok", f"at most n_routed_experts ({config.n_routed_experts})")

    def check_repeated(self, config: ModelConfig) -> None:
        """Refuse fields that contradict those that are read."""
        for field, rule in REPEATS.items():
            value, expected = self.raw.get(field), rule.expected(config)
            if isinstance(value, list) and isinstance(expected, list):
                value = value[: len(expected)]  # entries of draft layers follow
            if value is not None and not same(value, expected):
                raise self.fail(field, f"{shown(expected)}, as {rule.source} gives ({rule.reason}), or nothing")
        groups, chosen = (1 if self.raw.get(field) is None else self.raw[field] for field in ("n_group", "topk_group"))
        if type(groups) is not int or not same(groups, chosen):
            field = "n_group" if "n_group" in self.raw else "topk_group"
            expected = "n_group and topk_group to be the same number, as experts of every group may be chosen"
            raise self.fail(field, f"{expected} (found {shown(groups)} and {shown(chosen)})")
