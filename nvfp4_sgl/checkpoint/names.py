"""The tensors of a DeepSeek-V4 checkpoint, by DeepSeek's original names. Source: specification §8.1.

A *stem* is a matrix's name without its suffix (``layers.3.attn.wq_b``). What is stored under a stem depends on the
format of that matrix alone, never on a flag for the whole checkpoint: :mod:`.storage`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.draft_config import DsparkConfig

MTP_PREFIX = "mtp."
"""Draft layers, those of DSpark too; a decoder reads none of them."""
DRAFT_COPIES = re.compile(rf"{re.escape(MTP_PREFIX)}\d+\.(emb|head)\.")
"""Copies of the decoder's embedding and head that some releases have beside an MTP block; not read."""
MARKOV = ("markov_w1", "markov_w2")
"""DSpark's low-rank bias of logits by the token before."""
CONFIDENCE = ".confidence_head.proj.weight"
"""End of the name of DSpark's estimate of acceptance, which a server does not ask."""


class Role(enum.Enum):
    """The role of a tensor, which decides its possible storages."""

    LINEAR = "linear"
    """A dense matrix, in any storage."""
    EXPERT_LINEAR = "expert linear"
    """A matrix of one routed expert, in any storage."""
    PLAIN = "plain"
    """Norms, embedding, head, router, index weights: BF16 or F32, never quantised."""
    FP32 = "fp32"
    """mHC parameters, compressor biases, sinks, router bias: F32."""
    TID2EID = "token→expert"
    """Expert ids by token id of a hash-routed layer: I64 or I32."""

    @property
    def is_matrix(self) -> bool:
        """Whether specs of this role carry a stem instead of a full name."""
        return self in (Role.LINEAR, Role.EXPERT_LINEAR)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One logical tensor. ``name`` is a stem for matrices, the full name otherwise; ``shape`` is the logical one."""

    name: str
    shape: tuple[int, ...]
    role: Role

    @property
    def key(self) -> str:
        """Name of the tensor that holds the values: ``<stem>.weight`` for matrices."""
        return f"{self.name}.weight" if self.role.is_matrix else self.name


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every logical tensor of the decoder (without MTP), by name or stem, in the order of the model."""
    specs = [
        TensorSpec("embed.weight", (config.vocab_size, config.hidden_size), Role.PLAIN),
        *(spec for layer in range(config.num_hidden_layers) for spec in _decoder_layer(config, layer)),
        *_hyper_head(config, "hc_head"),
        TensorSpec("norm.weight", (config.hidden_size,), Role.PLAIN),
        TensorSpec("head.weight", (config.vocab_size, config.hidden_size), Role.PLAIN),
    ]
    return {spec.name: spec for spec in specs}


def mtp_specs(config: ModelConfig, index: int = 0) -> dict[str, TensorSpec]:
    """Logical tensors of MTP block ``index``: a window-only, top-k routed block with its own head parameters (§7)."""
    stem, d = f"{MTP_PREFIX}{index}", config.hidden_size
    specs = [
        *draft_block(config, index),
        TensorSpec(f"{stem}.e_proj", (d, d), Role.LINEAR),
        TensorSpec(f"{stem}.h_proj", (d, d), Role.LINEAR),
        *(TensorSpec(f"{stem}.{norm}.weight", (d,), Role.PLAIN) for norm in ("enorm", "hnorm", "norm")),
        *_hyper_head(config, f"{stem}.hc_head"),
    ]
    return {spec.name: spec for spec in specs}


def dspark_specs(config: ModelConfig, dspark: DsparkConfig) -> dict[str, TensorSpec]:
    """Logical tensors of a DSpark draft: its stages, what the first reads of the target, the heads of the last (§7)."""
    d, first, last = config.hidden_size, f"{MTP_PREFIX}0", f"{MTP_PREFIX}{dspark.stages - 1}"
    embedding = (config.vocab_size, dspark.markov_rank)
    specs = [
        TensorSpec(f"{first}.main_proj", (d, len(dspark.captured_layers) * d), Role.LINEAR),
        TensorSpec(f"{first}.main_norm.weight", (d,), Role.PLAIN),
        *(spec for index in range(dspark.stages) for spec in draft_block(config, index)),
        TensorSpec(f"{last}.norm.weight", (d,), Role.PLAIN),
        *_hyper_head(config, f"{last}.hc_head"),
        *(TensorSpec(f"{last}.markov_head.{name}.weight", embedding, Role.PLAIN) for name in MARKOV),
        TensorSpec(f"{last}{CONFIDENCE}", (1, d + dspark.markov_rank), Role.PLAIN),
    ]
    return {spec.name: spec for spec in specs}


def draft_block(config: ModelConfig, index: int) -> Iterator[TensorSpec]:
    """The tensors that draft block ``index``, of MTP or a stage of DSpark, shares with decoder layers."""
    return _block(config, f"{MTP_PREFIX}{index}", LayerKind.SWA, hash_routed=False)


def _decoder_layer(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    return _block(config, f"layers.{layer}", config.kind(layer), config.is_hash_routed(layer))


def _block(config: ModelConfig, stem: str, kind: LayerKind, hash_routed: bool) -> Iterator[TensorSpec]:
    d, hc = config.hidden_size, config.hc_mult
    for site in ("attn", "ffn"):
        mixes = (2 + hc) * hc
        yield TensorSpec(f"{stem}.hc_{site}_fn", (mixes, hc * d), Role.FP32)
        yield TensorSpec(f"{stem}.hc_{site}_base", (mixes,), Role.FP32)
        yield TensorSpec(f"{stem}.hc_{site}_scale", (3,), Role.FP32)
        yield TensorSpec(f"{stem}.{site}_norm.weight", (d,), Role.PLAIN)
    yield from attention_specs(config, f"{stem}.attn", kind)
    yield from _experts(config, f"{stem}.ffn", hash_routed)


def _hyper_head(config: ModelConfig, stem: str) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{stem}_fn", (config.hc_mult, config.hc_mult * config.hidden_size), Role.FP32)
    yield TensorSpec(f"{stem}_base", (config.hc_mult,), Role.FP32)
    yield TensorSpec(f"{stem}_scale", (1,), Role.FP32)


def attention_specs(config: ModelConfig, stem: str, kind: LayerKind) -> Iterator[TensorSpec]:
    """Logical tensors of an attention layer of that kind, whose names begin with ``stem``."""
    d, head = config.hidden_size, config.head_dim
    q_width = config.num_attention_heads * head
    o_rows = config.o_groups * config.o_lora_rank
    yield TensorSpec(f"{stem}.attn_sink", (config.num_attention_heads,), Role.FP32)
    yield TensorSpec(f"{stem}.wq_a", (config.q_lora_rank, d), Role.LINEAR)
    yield TensorSpec(f"{stem}.q_norm.weight", (config.q_lora_rank,), Role.PLAIN)
    yield TensorSpec(f"{stem}.wq_b", (q_width, config.q_lora_rank), Role.LINEAR)
    yield TensorSpec(f"{stem}.wkv", (head, d), Role.LINEAR)
    yield TensorSpec(f"{stem}.kv_norm.weight", (head,), Role.PLAIN)
    yield TensorSpec(f"{stem}.wo_a", (o_rows, q_width // config.o_groups), Role.LINEAR)
    yield TensorSpec(f"{stem}.wo_b", (d, o_rows), Role.LINEAR)
    if kind is LayerKind.SWA:
        return
    yield from _compressor(config, f"{stem}.compressor", kind.value, head)
    if kind is LayerKind.CSA:
        index_width = config.index_n_heads * config.index_head_dim
        yield TensorSpec(f"{stem}.indexer.wq_b", (index_width, config.q_lora_rank), Role.LINEAR)
        yield TensorSpec(f"{stem}.indexer.weights_proj.weight", (config.index_n_heads, d), Role.PLAIN)
        yield from _compressor(config, f"{stem}.indexer.compressor", kind.value, config.index_head_dim)


def _compressor(config: ModelConfig, stem: str, ratio: int, head: int) -> Iterator[TensorSpec]:
    # Windows of ratio 4 overlap: one half of the channels serves the next window, the other the current one (§4).
    width = 2 * head if ratio == LayerKind.CSA.value else head
    yield TensorSpec(f"{stem}.ape", (ratio, width), Role.FP32)
    yield TensorSpec(f"{stem}.wkv", (width, config.hidden_size), Role.LINEAR)
    yield TensorSpec(f"{stem}.wgate", (width, config.hidden_size), Role.LINEAR)
    yield TensorSpec(f"{stem}.norm.weight", (head,), Role.PLAIN)


def _experts(config: ModelConfig, stem: str, hash_routed: bool) -> Iterator[TensorSpec]:
    d, inner, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    yield TensorSpec(f"{stem}.gate.weight", (experts, d), Role.PLAIN)
    if hash_routed:
        yield TensorSpec(f"{stem}.gate.tid2eid", (config.vocab_size, config.num_experts_per_tok), Role.TID2EID)
    else:
        yield TensorSpec(f"{stem}.gate.bias", (experts,), Role.FP32)
    for owner, role in (
        ("shared_experts", Role.LINEAR),
        *((f"experts.{expert}", Role.EXPERT_LINEAR) for expert in range(experts)),
    ):
        yield TensorSpec(f"{stem}.{owner}.w1", (inner, d), role)
        yield TensorSpec(f"{stem}.{owner}.w2", (d, inner), role)
        yield TensorSpec(f"{stem}.{owner}.w3", (inner, d), role)
