"""transformers' names of the tensors beside DeepSeek's original ones, both ways. Source: specification §8.1.

Exports of full-precision models through transformers have these names (``model.layers.0.self_attn.q_a_proj.weight``);
the experts must be stored one by one, as exporters of quantised checkpoints do. What follows a matrix's stem
(``weight``, ``weight_scale``, …) is the same in both.
"""

from __future__ import annotations

import re

from nvfp4_sgl.checkpoint.names import MTP_PREFIX

MARKS = re.compile(r"\.self_attn\.|\.mlp\.|embed_tokens\.weight$|^lm_head\.weight$|^model\.hc_head\.")
"""Found in transformers' names and in no original one."""
PREFIX = "model."

_TOP = {
    "embed": "model.embed_tokens",
    "head": "lm_head",
    "norm": "model.norm",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_ATTENTION = {
    "attn_sink": "sinks",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_norm",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "kv_norm": "kv_norm",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "compressor.ape": "compressor.position_bias",
    "compressor.wkv": "compressor.kv_proj",
    "compressor.wgate": "compressor.gate_proj",
    "compressor.norm": "compressor.kv_norm",
    "indexer.wq_b": "compressor.indexer.q_b_proj",
    "indexer.weights_proj": "compressor.indexer.scorer.weights_proj",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.compressor.wkv": "compressor.indexer.kv_proj",
    "indexer.compressor.wgate": "compressor.indexer.gate_proj",
    "indexer.compressor.norm": "compressor.indexer.kv_norm",
}
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    **{f"hc_{site}_{part}": f"{site}_hc.{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale")},
    **{f"attn.{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"ffn.shared_experts.{ours}": f"mlp.shared_experts.{theirs}" for ours, theirs in _PROJECTIONS.items()},
    **{f"ffn.experts.*.{ours}": f"mlp.experts.*.{theirs}" for ours, theirs in _PROJECTIONS.items()},
}
_OLDER = {"self_attn.compressor.indexer.weights_proj": "attn.indexer.weights_proj"}
"""Names of transformers before 5.10."""

_ORIGINAL_TOP = {theirs: ours for ours, theirs in _TOP.items()}
_ORIGINAL_LAYER = {theirs: ours for ours, theirs in _LAYER.items()} | _OLDER
_NUMBERED = re.compile(r"^layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def original_name(name: str) -> str | None:
    """DeepSeek's name of the tensor, or of the module, that transformers calls ``name``; ``None`` if it has no such."""
    if name.removeprefix(PREFIX).startswith(MTP_PREFIX):
        return name.removeprefix(PREFIX)
    if name in _ORIGINAL_TOP or name.rpartition(".")[0] in _ORIGINAL_TOP:
        return _renamed(name, _ORIGINAL_TOP)
    found = _NUMBERED.match(name.removeprefix(PREFIX))
    inner = _renamed(found[2], _ORIGINAL_LAYER) if found and name.startswith(PREFIX) else None
    return f"layers.{found[1]}.{inner}" if found and inner else None


def transformers_name(name: str) -> str | None:
    """transformers' name of the tensor or module that DeepSeek calls ``name``; ``None`` if there is none."""
    if name.startswith(MTP_PREFIX):
        return f"{PREFIX}{name}"
    if found := _NUMBERED.match(name):
        inner = _renamed(found[2], _LAYER)
        return f"{PREFIX}layers.{found[1]}.{inner}" if inner else None
    return _renamed(name, _TOP)


def _renamed(name: str, table: dict[str, str]) -> str | None:
    """``name``, or all of it but its suffix, by ``table``, in which ``*`` stands for an expert's number."""
    number = _EXPERT.search(name)
    general = _EXPERT.sub("*", name)
    module, _, suffix = general.rpartition(".")
    if general in table:
        renamed = table[general]
    elif module in table:
        renamed = f"{table[module]}.{suffix}"
    else:
        return None
    return renamed.replace("*", number[0]) if number else renamed
