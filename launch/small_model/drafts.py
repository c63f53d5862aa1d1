"""Drafts as they are trained: every position of a text drafts at once, and computes what a server computes round by
round (``nvfp4_sgl/model``: ``MtpDraft``, ``DsparkDraft``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DeepseekV4Config
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from nvfp4_sgl.formats import e2m1, nvfp4
from nvfp4_sgl.formats.e4m3 import E4M3_MAX, E4M3_MIN, round_to_e4m3
from small_model.network import DraftBlock, keep_choice, theirs

ATTENTION = "small_draft"
STEPS = 3
"""Tokens that the MTP block drafts in training, one after the other; the server's default."""
STAGES, BLOCK, RANK, NOISE_TOKEN = 3, 5, 32, 2
"""Sizes of DSpark: its blocks, tokens that it guesses at once, rank of the bias, and the token of unknown places."""


@dataclass(frozen=True)
class Seen:
    """Keys that the queries of a pass attend to.

    Attributes:
        visible: bool [B or 1, Q, S], which of ``keys`` each query sees.
        keys: [B, S, head_dim]; the pass's own unless given.
        groups: the queries in groups, each with keys that no other group sees: the pass's own and ``before``.
        before: of earlier passes, [B, Q, head_dim] each.
    """

    visible: Tensor
    keys: Tensor | None = None
    groups: int = 0
    before: list[Tensor] = field(default_factory=list)


def draft_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention over ``module.seen``; keeps the pass's keys [B, Q, head_dim] in ``module.own``."""
    batch, heads, tokens, dim = query.shape
    seen, own = module.seen, key[:, 0]
    module.own = own
    keys = own if seen.keys is None else seen.keys
    scores = torch.bmm(query.reshape(batch, -1, dim), keys.transpose(1, 2)).view(batch, heads, tokens, -1) * scaling
    parts = [scores.masked_fill(~seen.visible[:, None], -torch.inf)]
    sinks = module.sinks.view(1, -1, 1, 1).expand(batch, -1, tokens, 1)
    if not seen.groups:
        weights = torch.cat([*parts, sinks], -1).softmax(-1)[..., :-1]
        return torch.bmm(weights.reshape(batch, heads * tokens, -1), keys).view_as(query).transpose(1, 2), None
    near = torch.cat([x.view(batch, seen.groups, -1, dim) for x in (*seen.before, own)], 2)  # [B, G, E, head_dim]
    grouped = query.view(batch, heads, seen.groups, -1, dim)
    parts.append(torch.einsum("bhgqd,bged->bhgqe", grouped, near).flatten(2, 3) * scaling)
    weights = torch.cat([*parts, sinks], -1).softmax(-1)[..., :-1]
    far, close = weights.split([keys.shape[1], near.shape[2]], -1)
    result = torch.bmm(far.reshape(batch, heads * tokens, -1), keys).view_as(query)
    close = torch.einsum("bhgqe,bged->bhgqd", close.unflatten(2, (seen.groups, -1)), near)
    return (result + close.flatten(2, 3)).transpose(1, 2), None


AttentionInterface.register(ATTENTION, draft_attention)


def draft_config(raw: dict[str, Any]) -> DeepseekV4Config:
    """transformers' configuration of a decoder with :data:`STAGES` window-only layers behind its own."""
    layers = raw["num_hidden_layers"]
    ratios = [*raw["compress_ratios"][:layers], *[0] * STAGES]
    config = theirs({**raw, "num_hidden_layers": layers + STAGES, "compress_ratios": ratios})
    config._attn_implementation = ATTENTION
    return config


class DsparkBlocks(nn.Module):
    """DSpark's stages and heads."""

    def __init__(self, config: DeepseekV4Config, layers: int, captured: int):
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.window = config.sliding_window
        self.main_proj = nn.Linear(captured * d, d, bias=False)
        self.main_norm, self.norm = (hf.DeepseekV4RMSNorm(d, eps=eps) for _ in range(2))
        self.stages = nn.ModuleList(hf.DeepseekV4DecoderLayer(config, layers + stage) for stage in range(STAGES))
        self.hc_head = hf.DeepseekV4HyperHead(config)
        self.markov_w1, self.markov_w2 = (nn.Parameter(torch.randn(config.vocab_size, RANK) * 0.05) for _ in range(2))
        self.confidence = nn.Linear(d + RANK, 1, bias=False)

    def forward(self, captured: Sequence[Tensor], block: Tensor, anchors: Tensor, rope: Any) -> Tensor:
        """``x`` [B, A, BLOCK, d], not normalised.

        Args:
            captured: the target's streams [B, S, 4, d] behind its layers.
            block: [B, A, BLOCK, d], embeddings of the token behind each anchor and of noise.
            anchors: int64 [B, A], the last position that each block sees of the target.
            rope: (cos, sin) of positions [B, P].
        """
        batch, count, length, d = block.shape
        tokens = captured[0].shape[1]
        context = self.main_norm(self.main_proj(torch.cat([streams.mean(2) for streams in captured], -1)))
        places = torch.arange(tokens, device=block.device)
        behind = anchors[..., None] - places  # [B, A, S]
        visible = ((behind >= 0) & (behind < self.window)).repeat_interleave(length, 1)
        positions = (anchors[..., None] + 1 + torch.arange(length, device=block.device)).flatten(1)
        streams = block.flatten(1, 2).unsqueeze(2).expand(-1, -1, self.hc_head.hc_mult, -1).contiguous()
        of_context, of_block = rope(places[None]), rope(positions)
        for stage in self.stages:
            attention: Any = stage.self_attn
            keys = attention.kv_norm(attention.kv_proj(context))[:, None]
            attention.seen = Seen(visible, hf.apply_rotary_pos_emb(keys, *of_context)[:, 0], groups=count)
            streams = stage(
                streams, position_embeddings={"main": of_block}, position_ids=positions, attention_mask=None
            )
        return self.hc_head(streams).view(batch, count, length, d)


@dataclass(frozen=True)
class Drafted:
    """Hidden states of both drafts for a batch.

    Attributes:
        chain: hidden states [B, R, d] for the LM head of each step; of row t in step i, of token t + 2 + i.
        block: the same of DSpark, [B, A, BLOCK, d]; of anchor P in place i, of token P + 2 + i, without the bias.
        x: in front of DSpark's norm, for its confidence.
    """

    chain: list[Tensor]
    block: Tensor
    x: Tensor


class Drafts(nn.Module):
    """An MTP block and a DSpark draft behind a frozen target."""

    def __init__(self, raw: dict[str, Any], seed: int):
        super().__init__()
        torch.manual_seed(seed)
        config, layers = draft_config(raw), raw["num_hidden_layers"]
        self.window = config.sliding_window
        self.mtp = DraftBlock(config, layers)
        self.dspark = DsparkBlocks(config, layers, len(captured_layers(raw)))
        initializer = hf.DeepseekV4PreTrainedModel(config)
        for part in self.modules():
            initializer._init_weights(part)
        self.rotary = hf.DeepseekV4RotaryEmbedding(config)
        for layer in self.layers():
            keep_choice(layer)

    def layers(self) -> list[Any]:
        """Every layer, MTP's first."""
        return [self.mtp.block, *self.dspark.stages]

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of int64 positions [B, P], fp32."""
        found: tuple[Tensor, Tensor] = self.rotary(
            positions.new_zeros((), dtype=torch.float32), position_ids=positions, layer_type="main"
        )
        return found

    def forward(self, streams: Sequence[Tensor], embedded: Tensor, noise: Tensor, anchors: Tensor) -> Drafted:
        """Draft at every position of a text, and blocks behind anchors.

        Args:
            streams: of the target, [B, S, 4, d] behind each captured layer, the last among them.
            embedded: [B, S, d], embeddings of the text. noise: [d], of the noise token.
            anchors: int64 [B, A], less than S - 1.
        """
        batch = len(embedded)
        first = embedded.gather(1, (anchors + 1)[..., None].expand(-1, -1, embedded.shape[-1]))
        rest = noise.expand(batch, anchors.shape[1], BLOCK - 1, -1)
        x = self.dspark(streams, torch.cat([first[:, :, None], rest], 2), anchors, self.rope)
        return Drafted(self.chain(streams[-1], embedded), self.dspark.norm(x), x)

    def chain(self, streams: Tensor, embedded: Tensor) -> list[Tensor]:
        """Hidden states of :data:`STEPS` steps from each of the first S - STEPS positions."""
        rows = embedded.shape[1] - STEPS
        places = torch.arange(rows, device=embedded.device)
        attention: Any = self.mtp.block.self_attn
        streams, keys, hidden = streams[:, :rows], list[Tensor](), list[Tensor]()
        for step in range(STEPS):
            behind = places[:, None] - places
            visible = ((behind >= 0) & (behind + step < self.window))[None]
            # Positions of the target come from the first step, those of this draft from its own steps.
            attention.seen = Seen(visible, keys[0], rows, keys[1:]) if step else Seen(visible)
            positions = (places + step)[None]
            now, streams = self.mtp(
                streams,
                embedded[:, 1 + step : 1 + step + rows],
                position_embeddings={"main": self.rope(positions)},
                position_ids=positions,
                attention_mask=None,
            )
            keys.append(attention.own)
            hidden.append(now)
        return hidden


def captured_layers(raw: dict[str, Any]) -> list[int]:
    """Layers of the target that DSpark reads: the last three, or all if there are fewer."""
    return [*range(raw["num_hidden_layers"])][-3:]


def quantised(drafts: nn.Module) -> dict[str, Tensor]:
    """The parameters with matrices rounded to NVFP4, as ``nvfp4-sgl convert`` does; gradients pass the rounding."""
    return {
        name: value + (rounded(name, value.detach()) - value.detach()) if is_matrix(name) else value
        for name, value in drafts.named_parameters()
    }


def is_matrix(name: str) -> bool:
    """Whether a parameter is one of the matrices that NVFP4 is for: not routers, mHC, the bias and confidence."""
    return name.endswith(("_proj.weight", "_proj"))


def rounded(name: str, w: Tensor) -> Tensor:
    """A matrix, or a stack of them, in NVFP4 and back."""
    if name.endswith("gate_up_proj"):  # two matrices, each with a global scale of its own
        return torch.cat([round_to_nvfp4(half) for half in w.chunk(2, 1)], 1)
    return round_to_nvfp4(w)


def round_to_nvfp4(w: Tensor) -> Tensor:
    """``nvfp4.quantize_weight(w).dequantize()`` without its checks, which wait for the device."""
    scale = w.abs().amax((-2, -1)).clamp_min(nvfp4.AMAX_FLOOR)[..., None, None] / nvfp4.FULL_SCALE
    blocks = w.unflatten(-1, (-1, nvfp4.BLOCK))
    of_block = blocks.abs().amax(-1) / (e2m1.E2M1_MAX * scale)
    of_block = torch.where(of_block == 0, 1.0, of_block).clamp(E4M3_MIN, E4M3_MAX)
    step = (round_to_e4m3(of_block).float() * scale)[..., None]
    return (e2m1.decode(e2m1.encode(blocks / step)) * step).flatten(-2)
