"""The decoder: attention and experts around four residual streams, and the final collapse. The same on every target."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.model.attention import Attention
from nvfp4_sgl.model.contract import Context, Form, Site, SiteNames
from nvfp4_sgl.model.moe import MoE
from nvfp4_sgl.model.tokens import tokens_of
from nvfp4_sgl.weights.parallel import Collective


class Block(nn.Module):
    """Attention and experts of one layer, and the mHC sites in front of them."""

    def __init__(self, context: Context, layer: int):
        super().__init__()
        stem, iterations = f"layers.{layer}", context.config.hc_sinkhorn_iters
        self.attn = Attention(context, layer)
        self.ffn = MoE(context, layer)
        site = context.boundaries.site
        attention = SiteNames(f"{stem}.hc_attn", f"{stem}.attn_norm.weight", iterations)
        experts = SiteNames(f"{stem}.hc_ffn", f"{stem}.ffn_norm.weight", iterations)
        self.hc_attn = site(context, attention, self.attn.takes)
        self.hc_ffn = site(context, experts, self.ffn.takes)


def final_collapse(context: Context) -> Site:
    """The site behind the last layer, which collapses the streams for the LM head."""
    return context.boundaries.site(context, SiteNames("hc_head", "norm.weight", 0), Form.VALUES)


class Decoder(nn.Module):
    """A range of layers, all of them unless given: between the embedding and the LM head, or a stage of that.

    Construction loads the weights: every tensor of these layers is read from ``context.source``, and the final
    collapse's if the range ends with the last layer. ``embed`` and ``head`` are the caller's.
    """

    def __init__(self, context: Context, layers: range | None = None):
        super().__init__()
        config = context.config
        context.parallel.check(config)
        self.context, self.embedding = context, context.boundaries.embed(context)
        self.range = range(config.num_hidden_layers) if layers is None else layers
        self.layers = nn.ModuleList(Block(context, layer) for layer in self.range)
        self.hc_head = None
        if self.range.stop == config.num_hidden_layers:
            self.hc_head = final_collapse(context)

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Residual streams [T, n, d] of ``token_ids``, int [T], from the whole embedding table [vocabulary, d]."""
        return self.embedding.embed(token_ids, table)

    def expand(self, embedded: Tensor) -> Tensor:
        """Residual streams [T, n, d] of embeddings [T, d], in the model dtype."""
        return self.embedding.expand(embedded)

    def distinct_layers(self) -> list[int]:
        """One layer of each kind, by their places in the range: between them they launch whatever the range does."""
        first: dict[Hashable, int] = {}
        for place, (layer, block) in enumerate(zip(self.range, self.layers, strict=True)):
            modules = tuple((name, type(module)) for name, module in block.named_modules())
            tensors = tuple((name, tensor.shape, tensor.dtype) for name, tensor in block.state_dict().items())
            first.setdefault((self.context.config.kind(layer), modules, tensors), place)
        return list(first.values())

    def forward(
        self,
        streams: Tensor,
        token_ids: Tensor,
        step: Any,
        caches: Sequence[LayerCache],
        only: Sequence[int] | None = None,
    ) -> Tensor:
        """Hidden states [T, d] for the LM head; streams [T, n, d] if the range ends before the last layer.

        Args:
            streams: [T, n, d] from :meth:`embed`, :meth:`expand` or the range before; may be overwritten.
            token_ids: int [T]; the first layers route by them.
            step: the planned pass.
            caches: one a layer of the range.
            only: places of the layers that run, all unless given; with some left out the result means nothing.
        """
        tokens = tokens_of(self.context.parallel, len(token_ids))
        places = range(len(self.layers)) if only is None else only
        blocks: list[Any] = [self.layers[place] for place in places]
        following = [block.hc_attn for block in blocks[1:]] + [self.hc_head]
        streams = tokens.own(streams)
        x, mix = blocks[0].hc_attn.enter(streams, step, gather=tokens.gather)
        for block, after, place in zip(blocks, following, places, strict=True):
            output = tokens.sum(Collective.ATTENTION_OUTPUT, block.attn(x, step, caches[place]))
            x, streams, mix = block.hc_ffn.advance(output, streams, mix, step, gather=tokens.gather)
            output = tokens.sum(Collective.EXPERT_OUTPUT, block.ffn(x, token_ids, step))
            if after is None:
                return block.hc_ffn.leave(output, streams, mix, gather=tokens.gather)
            x, streams, mix = after.advance(output, streams, mix, step, gather=tokens.gather)
        return x.require_values()
