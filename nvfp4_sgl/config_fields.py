"""Every known field of config.json, and its rule: the one table that all readers share.

A field is read within bounds (:class:`Integer`, :class:`Number`), must hold a fixed value if it is there
(:class:`Fixed`), must say again what other fields say (:class:`Repeats`), is checked where it is used
(:class:`Elsewhere`), or changes nothing that is computed (:class:`NoEffect`). ``inspect`` names fields that are not in
the table. Bounds leave sixteen times what the releases have, unless their reason says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from nvfp4_sgl.limits import MAX_CONFIGURED_EXPERTS, MAX_HC_EPS, MIN_HC_EPS

if TYPE_CHECKING:
    from nvfp4_sgl.config import ModelConfig

MAX_LAYERS = 1024
"""Bounds what is built before files are read. Pro has 61."""
MODEL_TYPE = "deepseek_v4"


@dataclass(frozen=True)
class Integer:
    """Read: an integer from ``low`` to ``high``."""

    low: int
    high: int
    reason: str

    def takes(self, value: object) -> bool:
        """Whether ``value`` is within the bounds."""
        return type(value) is int and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"an integer from {self.low} to {self.high}"


@dataclass(frozen=True)
class Number:
    """Read: a number from ``low`` to ``high``."""

    low: float
    high: float
    reason: str

    def takes(self, value: object) -> bool:
        """Whether ``value`` is within the bounds."""
        return type(value) in (int, float) and self.low <= value <= self.high  # type: ignore[operator]

    def __str__(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Fixed:
    """One of ``values`` if present; nothing else is implemented."""

    values: tuple[object, ...]
    reason: str

    def takes(self, value: object) -> bool:
        """Whether ``value`` is one of them; ``true`` is not 1."""
        return any(same(value, one) for one in self.values)

    def __str__(self) -> str:
        return " or ".join("null" if one is None else repr(one) for one in self.values)


@dataclass(frozen=True)
class Repeats:
    """Says again what other fields say, or is null or absent.

    Attributes:
        expected: of a configuration, the value.
        source: the fields that it follows from, in words.
    """

    expected: Callable[[ModelConfig], object]
    source: str
    reason: str


@dataclass(frozen=True)
class Elsewhere:
    """Read and checked by code of its own."""

    reason: str


@dataclass(frozen=True)
class NoEffect:
    """Changes nothing that is computed here."""

    reason: str


Rule: TypeAlias = Integer | Number | Fixed | Repeats | Elsewhere | NoEffect


def same(value: object, other: object) -> bool:
    """Equality that tells ``true`` from 1, and takes 1 and 1.0 for one number."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, int | float) and isinstance(other, int | float):
        return value == other or math.isclose(value, other, rel_tol=1e-12)
    return value == other


_SIZE = "a size of tensors"
_FREQUENCY = "the base of RoPE's frequencies: at 1 or less they do not fall"
_EPSILON = "fp32 holds its reciprocal square root; it is small beside 1"
YARN: dict[str, Integer | Number] = {
    "factor": Number(1, 2.0**12, "16 in the releases; frequencies are divided by it"),
    "original_max_position_embeddings": Integer(1, 2**24, "65536 in the releases"),
    "beta_fast": Number(2.0**-10, 2.0**12, "32 in the releases; its logarithm is taken"),
    "beta_slow": Number(2.0**-10, 2.0**12, "1 in the releases; its logarithm is taken"),
}
"""What is read of ``rope_scaling``."""
READ: dict[str, Integer | Number] = {
    "vocab_size": Integer(1, 2**24, _SIZE),
    "hidden_size": Integer(1, 2**17, _SIZE),
    "num_hidden_layers": Integer(1, MAX_LAYERS, "bounds what is built before files are read"),
    "num_attention_heads": Integer(1, 2**11, _SIZE),
    "head_dim": Integer(1, 2**13, _SIZE),
    "qk_rope_head_dim": Integer(1, 2**10, _SIZE),
    "q_lora_rank": Integer(1, 2**15, _SIZE),
    "o_groups": Integer(1, 2**8, _SIZE),
    "o_lora_rank": Integer(1, 2**14, _SIZE),
    "sliding_window": Integer(1, 2**11, "128 in the releases; rows of this many tokens are kept for every request"),
    "moe_intermediate_size": Integer(1, 2**16, _SIZE),
    "n_routed_experts": Integer(1, MAX_CONFIGURED_EXPERTS, "bounds what is built before files are read"),
    "num_experts_per_tok": Integer(1, MAX_CONFIGURED_EXPERTS, "at most n_routed_experts"),
    "routed_scaling_factor": Number(2.0**-10, 2.0**10, "1.5 and 2.5 in the releases; experts' outputs stay finite"),
    "swiglu_limit": Number(
        0.5,
        2.0**16,
        "10 in the releases; SiLU is never below -0.28; sums of its square stay finite",
    ),
    "num_hash_layers": Integer(0, MAX_LAYERS, "3 in the releases"),
    "index_n_heads": Integer(1, 2**10, _SIZE),
    "index_head_dim": Integer(1, 2**11, _SIZE),
    "index_topk": Integer(1, 2**14, "512 and 1024 in the releases; entries that a query selects"),
    "hc_mult": Integer(1, 2**6, _SIZE),
    "hc_sinkhorn_iters": Integer(1, 320, "20 in the releases; iterations in every layer of a pass"),
    "hc_eps": Number(MIN_HC_EPS, MAX_HC_EPS, "1e-6 in the releases; fp32 holds four divisors of Sinkhorn multiplied"),
    "rms_norm_eps": Number(1e-30, 1.0, f"1e-6 in the releases; {_EPSILON}"),
    "rope_theta": Number(2.0, 1e12, _FREQUENCY),
    "compress_rope_theta": Number(2.0, 1e12, f"{_FREQUENCY}, and YaRN divides by its logarithm"),
    "max_position_embeddings": Integer(1, 2**24, "2^20 in the releases; fp32 holds every position"),
    "num_nextn_predict_layers": Integer(0, MAX_LAYERS, "1 in the releases; may be absent"),
}
"""Fields that are read as numbers; all must be there but ``num_nextn_predict_layers``."""

_ABSENT = (None,)
FIXED: dict[str, Fixed] = {
    "model_type": Fixed((MODEL_TYPE,), "V4.1 computes otherwise; the field must be there"),
    "num_key_value_heads": Fixed((1,), "keys and values have one head"),
    "n_shared_experts": Fixed((1,), "one shared expert a layer"),
    "scoring_func": Fixed(("sqrtsoftplus",), "how experts are scored"),
    "topk_method": Fixed(("noaux_tc",), "how experts are chosen"),
    "norm_topk_prob": Fixed((True,), "experts' weights are divided by their sum"),
    "tie_word_embeddings": Fixed((False,), "embedding and head are two tensors"),
    "hidden_act": Fixed(("silu",), "the experts' activation"),
    "attention_bias": Fixed((False,), "attention has no biases"),
    "mlp_bias": Fixed((False,), "experts have no biases"),
    "is_encoder_decoder": Fixed((False,), "only a decoder is computed"),
    "first_k_dense_replace": Fixed((0,), "every layer has experts"),
    "moe_layer_freq": Fixed((1,), "every layer has experts"),
    "q_head_norm": Fixed((True,), "V4 normalises the heads of queries, V4.1 does not"),
    "hc_pre_from_prev_sublayer": Fixed((False,), "V4.1's hyper-connections"),
    "kv_source_layer_ids": Fixed(([],), "V4.1's caches that layers share"),
    "index_source_layer_ids": Fixed(([],), "V4.1's selections that layers share"),
    "candidate_source_layer_id": Fixed((-1,), "V4.1's candidates"),
    "candidate_topk_blocks": Fixed((0,), "V4.1's candidates"),
    "candidate_block_size": Fixed((0,), "V4.1's candidates"),
    "engram_layer_ids": Fixed(([],), "V4.1's n-gram memory"),
    "vision_n_layers": Fixed((0,), "only text is read"),
    "rope_interleave": Fixed((True,), "RoPE rotates pairs of neighbouring dimensions"),
    "text_config": Fixed(_ABSENT, "SGLang would read its fields instead"),
    "llm_config": Fixed(_ABSENT, "SGLang would read its fields instead"),
    "language_config": Fixed(_ABSENT, "SGLang would read its fields instead"),
    "thinker_config": Fixed(_ABSENT, "SGLang would read its fields instead"),
    "vision_config": Fixed(_ABSENT, "only text is read"),
    "audio_config": Fixed(_ABSENT, "only text is read"),
    "compression_config": Fixed(_ABSENT, "the older name of quantization_config"),
    **dict.fromkeys(
        ("dtype", "torch_dtype"),
        Fixed((None, "bfloat16", "float16", "float32"), "dtype of what is not quantised; --dtype decides"),
    ),
}

_CONTEXT = Repeats(lambda c: c.max_position_embeddings, "max_position_embeddings", "SGLang reads it first")
_CSA, _HCA = "compressed_sparse_attention", "heavily_compressed_attention"
_LAYER_TYPES = {0: "sliding_attention", 4: _CSA, 128: _HCA}
REPEATS: dict[str, Repeats] = {
    "qk_nope_head_dim": Repeats(
        lambda c: c.head_dim - c.qk_rope_head_dim, "head_dim and qk_rope_head_dim", "the part of a head without RoPE"
    ),
    "qk_head_dim": Repeats(lambda c: c.head_dim, "head_dim", "another name of it"),
    "v_head_dim": Repeats(lambda c: c.head_dim, "head_dim", "keys are the values"),
    "kv_lora_rank": Repeats(lambda c: c.head_dim, "head_dim", "keys are the values, and not compressed further"),
    "partial_rotary_factor": Repeats(
        lambda c: c.qk_rope_head_dim / c.head_dim, "qk_rope_head_dim and head_dim", "transformers' share of a head"
    ),
    "intermediate_size": Repeats(
        lambda c: c.moe_intermediate_size, "moe_intermediate_size", "transformers takes one for the other"
    ),
    **dict.fromkeys(
        ("num_local_experts", "num_experts"),
        Repeats(lambda c: c.n_routed_experts, "n_routed_experts", "another name of it"),
    ),
    "window_size": Repeats(lambda c: c.sliding_window, "sliding_window", "another name of it"),
    "n_hash_layers": Repeats(lambda c: c.num_hash_layers, "num_hash_layers", "another name of it"),
    "layer_types": Repeats(
        lambda c: [_LAYER_TYPES[kind.value] for kind in c.layer_kinds], "compress_ratios", "transformers' name of it"
    ),
    "mlp_layer_types": Repeats(
        lambda c: ["hash_moe" if c.is_hash_routed(layer) else "moe" for layer in range(c.num_hidden_layers)],
        "num_hash_layers",
        "transformers' name of it",
    ),
    "compress_rates": Repeats(lambda c: {_CSA: 4, _HCA: 128}, "compress_ratios", "transformers' name of it"),
    "compress_rate_csa": Repeats(lambda c: 4, "compress_ratios", "transformers' name of it"),
    "compress_rate_hca": Repeats(lambda c: 128, "compress_ratios", "transformers' name of it"),
    **dict.fromkeys(("max_sequence_length", "seq_length", "max_seq_len", "model_max_length"), _CONTEXT),
}

ELSEWHERE: dict[str, Elsewhere] = {
    "architectures": Elsewhere("a list that begins with DeepseekV4ForCausalLM"),
    "compress_ratios": Elsewhere("0, 4 or 128 for every layer, and for draft layers"),
    "rope_scaling": Elsewhere("YaRN's parameters; nothing else is implemented"),
    "rope_parameters": Elsewhere("must agree with rope_theta, compress_rope_theta and rope_scaling"),
    "n_group": Elsewhere("1, null or topk_group: the choice of experts is not limited to groups"),
    "topk_group": Elsewhere("1, null or n_group: the choice of experts is not limited to groups"),
    "quantization_config": Elsewhere("must agree with the tensors of the matrices"),
    "expert_dtype": Elsewhere("must agree with the experts' tensors"),
    "activation_mode": Elsewhere("a mode of the target"),
}

DSPARK = "dspark_"
"""Prefix of what configures a DSpark draft."""
OF_DSPARK: dict[str, Fixed | Repeats | Elsewhere] = {
    "dspark_block_size": Elsewhere("tokens that a DSpark draft guesses at once, 1 to 9"),
    "dspark_markov_rank": Elsewhere("rank of a DSpark draft's bias, which depends on the previous token"),
    "dspark_noise_token_id": Elsewhere("stands for tokens of a block that are not guessed yet"),
    "dspark_target_layer_ids": Elsewhere("layers whose streams a DSpark draft reads"),
    "dspark_markov_head_type": Fixed((None, "vanilla"), "the bias of a DSpark draft is a matrix of low rank"),
    "sample_from_anchor": Fixed((True,), "a DSpark draft's block begins with a token that is already accepted"),
    "dspark_n_routed_experts": Repeats(
        lambda c: c.n_routed_experts, "n_routed_experts", "V4.1's DSpark drafts have fewer experts"
    ),
    **dict.fromkeys(
        ("dspark_num_experts_per_tok", "dspark_n_activated_experts"),
        Repeats(lambda c: c.num_experts_per_tok, "num_experts_per_tok", "V4.1's DSpark drafts choose fewer experts"),
    ),
}
"""What configures a DSpark draft; checked when there is one. No other field may begin with :data:`DSPARK` then."""


def _no_effect(reason: str, *names: str) -> dict[str, NoEffect]:
    return dict.fromkeys(names, NoEffect(reason))


NO_EFFECT: dict[str, NoEffect] = {
    **_no_effect(
        "used only in training",
        *("attention_dropout", "initializer_range", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha"),
        *("seq_aux", "pretraining_tp"),
    ),
    **_no_effect(
        "belongs to transformers' outputs or bookkeeping",
        *("transformers_version", "_name_or_path", "auto_map", "output_hidden_states", "output_attentions"),
        *("output_router_logits", "return_dict", "chunk_size_feed_forward", "id2label", "label2id", "problem_type"),
        *("use_cache", "use_return_dict"),
    ),
    **_no_effect("names tokens; the tokenizer and requests decide", "bos_token_id", "eos_token_id", "pad_token_id"),
    **_no_effect("how a run is spread over GPUs", "ep_size"),
    **_no_effect("what the exporter says it wrote", "moe_quant_algo"),
    **_no_effect(
        "matters only if engram_layer_ids names layers",
        *("engram_num_embeddings", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim"),
        *("engram_pad_token_id", "engram_compressed_vocab_size"),
    ),
    **_no_effect(
        "matters only if vision_n_layers is above 0",
        *("vision_dim", "vision_n_heads", "vision_inter_dim", "vision_patch_size", "vision_rope_theta"),
        *("vision_downsample_ratio", "vision_max_n_token", "vision_min_pixels", "vision_max_wh_ratio"),
        *("image_token_id", "language_model_only"),
    ),
}

FIELDS: dict[str, Rule] = {**READ, **FIXED, **REPEATS, **ELSEWHERE, **OF_DSPARK, **NO_EFFECT}


def unknown_fields(raw: Mapping[str, Any]) -> list[str]:
    """Fields of a config.json that are not in the table: they are not read, and may mean something to others."""
    return sorted(name for name in raw if name not in FIELDS)


def table() -> str:
    """The table as docs/checkpoints.md prints it."""
    rows = ["| field of config.json | what it may be | why |", "| --- | --- | --- |"]
    read = {**READ, **{f"rope_scaling.{name}": rule for name, rule in YARN.items()}}
    rows += [_row([name], str(rule), rule.reason) for name, rule in read.items()]
    for kind in (FIXED, REPEATS, ELSEWHERE, OF_DSPARK, NO_EFFECT):
        for names, rule in _grouped(kind.items()):
            rows.append(_row(names, _words(rule), rule.reason))
    return "\n".join(rows)


def _grouped(items: Iterable[tuple[str, Rule]]) -> list[tuple[list[str], Rule]]:
    """Fields with the same words in one row."""
    found: dict[tuple[str, str], tuple[list[str], Rule]] = {}
    for name, rule in items:
        found.setdefault((_words(rule), rule.reason), ([], rule))[0].append(name)
    return list(found.values())


def _words(rule: Rule) -> str:
    if isinstance(rule, Fixed):
        return f"{str(rule).replace(repr(True), 'true').replace(repr(False), 'false')}, if present"
    if isinstance(rule, Repeats):
        return f"what follows from {rule.source}, if present"
    return "checked where it is used" if isinstance(rule, Elsewhere) else "anything"


def _row(names: list[str], words: str, reason: str) -> str:
    return f"| {', '.join(f'`{name}`' for name in names)} | {words} | {reason} |"
