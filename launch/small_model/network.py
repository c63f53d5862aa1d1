"""The network: transformers' DeepSeek-V4, and an MTP block made of its layer class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from small_model.task import VOCABULARY

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_topk": 32,
}
"""What differs from the tiny checkpoints: less of everything that may be less, and no kernel depends on."""
ALL_ENTRIES = 1 << 20
"""An ``index_topk`` with which every entry is attended to."""
ATTENTION = "small_model"


def raw_config() -> dict[str, Any]:
    """config.json of the BF16 checkpoint."""
    return tiny_config(TinyFormat.BF16, SIZES)


def theirs(raw: dict[str, Any]) -> DeepseekV4Config:
    """The same for transformers."""
    ours = ("architectures", "torch_dtype", "quantization_config")
    config = DeepseekV4Config(**{key: value for key, value in raw.items() if key not in ours})
    config.initializer_range = 0.05
    config._attn_implementation = ATTENTION
    config._experts_implementation = "eager"
    return config


def window_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' eager attention with less work: the one head of keys is not repeated, far tokens are left out.

    Queries go in blocks of a window, which meet the keys of two windows and the compressed entries. Keeps in
    ``module.attended`` how much each query attends to each entry, fp32 [B, S, entries], summed over heads.
    """
    batch, heads, tokens, dim = query.shape
    entries = key.shape[2] - tokens
    block = module.sliding_window
    outputs, attended = [], []
    for start in range(0, tokens, block):
        end, first = min(start + block, tokens), max(start - block, 0)
        visible = min(entries, end // module.ratio) if entries else 0
        seen = (slice(first, end), slice(tokens, tokens + visible))
        keys = torch.cat([key[:, 0, part] for part in seen], dim=1)
        q = query[:, :, start:end].reshape(batch, -1, dim)
        scores = torch.bmm(q, keys.transpose(1, 2)).view(batch, heads, end - start, -1) * scaling
        scores = scores + torch.cat([attention_mask[:, :, start:end, part] for part in seen], dim=-1)
        sinks = module.sinks.view(1, -1, 1, 1).expand(batch, -1, end - start, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        outputs.append(torch.bmm(weights.reshape(batch, -1, keys.shape[1]), keys).view(batch, heads, -1, dim))
        to_entries = weights.detach()[..., end - first :].sum(1)
        attended.append(functional.pad(to_entries, (0, entries - visible)))
    module.attended = torch.cat(attended, dim=1)
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, window_attention)


class DraftBlock(nn.Module):
    """An MTP block: from the streams at t and the token at t + 1 the streams that predict token t + 2."""

    def __init__(self, config: DeepseekV4Config, layer: int):
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (hf.DeepseekV4RMSNorm(d, eps=eps) for _ in range(3))
        self.e_proj, self.h_proj = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.block = hf.DeepseekV4DecoderLayer(config, layer)
        self.hc_head = hf.DeepseekV4HyperHead(config)

    def forward(self, streams: Tensor, following: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """(hidden states [B, S, d] for the LM head, the block's own streams [B, S, 4, d]).

        Args:
            streams: [B, S, 4, d], the target's or the block's own. following: [B, S, d], embeddings of the next tokens.
        """
        streams = self.e_proj(self.enorm(following)).unsqueeze(2) + self.h_proj(self.hnorm(streams))
        streams = self.block(streams, **options)
        return self.norm(self.hc_head(streams)), streams


@dataclass
class Output:
    """``logits`` [B, S, vocab] predict the next token, ``draft`` [B, S - 1, vocab] the one after.

    Attributes:
        streams: behind each layer, [B, S, 4, d].
        index: of each CSA layer the indexer's scores and what the queries attend to, both [B, S, entries].
    """

    logits: Tensor
    streams: list[Tensor]
    draft: Tensor | None = None
    index: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class SmallModel(nn.Module):
    """Decoder and MTP block, with what training reads beside their results."""

    def __init__(self, raw: dict[str, Any], seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.config = theirs(raw)
        layers = self.config.num_hidden_layers
        self.decoder = DeepseekV4ForCausalLM(self.config)
        longer = theirs({**raw, "num_hidden_layers": layers + 1, "compress_ratios": [*raw["compress_ratios"], 0]})
        self.mtp = DraftBlock(longer, layers)
        self.mtp.apply(self.decoder._init_weights)
        nn.init.normal_(self.decoder.model.embed_tokens.weight)  # tokens differ from the first step on
        for place, layer in enumerate([*self.decoder.model.layers, self.mtp.block]):
            layer.self_attn.ratio = raw["compress_ratios"][place]
            if layer.mlp.is_hash:
                layer.mlp.gate.tid2eid.copy_(_table(self.config, place))
        for layer in self.csa_layers():
            indexer = layer.self_attn.compressor.indexer
            indexer.register_forward_pre_hook(_detach)
            indexer.scorer.register_forward_hook(_keep_scores)
        for layer in self.routed_layers():
            keep_choice(layer)

    def csa_layers(self) -> list[Any]:
        return [layer for layer in self.decoder.model.layers if layer.self_attn.ratio == LayerKind.CSA.value]

    def routed_layers(self) -> list[Any]:
        """Layers whose experts are chosen by scores, the MTP block's too."""
        return [layer for layer in [*self.decoder.model.layers, self.mtp.block] if not layer.mlp.is_hash]

    def set_topk(self, topk: int) -> None:
        """Sets the number of entries that CSA layers attend to from now on."""
        for layer in self.csa_layers():
            layer.self_attn.compressor.indexer.index_topk = topk

    def forward(self, ids: Tensor, draft: bool = False, window: int | None = None) -> Output:
        """Logits for int64 ids [B, S], computed without caches; ``window`` shortens the sliding window."""
        model = self.decoder.model
        tokens = ids.shape[1]
        positions = torch.arange(tokens, device=ids.device)[None]
        distance = positions.T - positions
        mask = torch.zeros(tokens, tokens, device=ids.device).masked_fill(
            (distance < 0) | (distance >= (window or self.config.sliding_window)), -torch.inf
        )
        embedded = model.embed_tokens(ids)
        options = {
            "position_embeddings": {
                kind: model.rotary_emb(embedded, position_ids=positions, layer_type=kind)
                for kind in ("main", "compress")
            },
            "position_ids": positions,
            "attention_mask": mask[None, None].expand(ids.shape[0], 1, -1, -1),
        }
        streams = embedded.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        behind = []
        for layer in model.layers:
            streams = layer(streams, input_ids=ids, **options)
            behind.append(streams)
        output = Output(self.decoder.lm_head(model.norm(model.hc_head(streams))), behind)
        if draft:
            hidden, _ = self.mtp(streams[:, :-1], embedded[:, 1:], **_shortened(options))
            output.draft = self.decoder.lm_head(hidden)
        for layer in self.csa_layers():
            indexer = layer.self_attn.compressor.indexer
            output.index.append((indexer.scorer.scores, layer.self_attn.attended))
        return output


def _shortened(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` of a forward pass without the last token."""
    return {
        "position_embeddings": {
            kind: (cos[:, :-1], sin[:, :-1]) for kind, (cos, sin) in options["position_embeddings"].items()
        },
        "position_ids": options["position_ids"][:, :-1],
        "attention_mask": options["attention_mask"][..., :-1, :-1],
    }


def _table(config: DeepseekV4Config, layer: int) -> Tensor:
    """Experts by token id, int64 [vocab, chosen], each expert equally often."""
    generator = torch.Generator().manual_seed(layer)
    order = torch.rand(config.vocab_size, config.n_routed_experts, generator=generator).argsort(dim=-1, stable=True)
    return order[:, : config.num_experts_per_tok]


def _detach(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Keep the indexer's gradient from the rest of the model."""
    return tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)


def _keep_scores(scorer: Any, _: Any, scores: Tensor) -> None:
    scorer.scores = scores


def keep_choice(layer: Any) -> None:
    """Let the router of ``layer`` keep in ``chosen`` how many tokens each expert got."""
    layer.mlp.gate.register_forward_hook(_keep_choice)


def _keep_choice(gate: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    gate.chosen = torch.bincount(output[2].flatten(), minlength=gate.num_experts)
