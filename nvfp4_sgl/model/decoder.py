"""The decoder: layers around four residual streams, and the final collapse. The same on every target."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.model.contract import Context, Form, Site, SiteNames
from nvfp4_sgl.model.layer import Block, Walk


def final_collapse(context: Context) -> Site[Any, Any]:
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
        self.layers = nn.ModuleList(Block(context, config.layer(layer)) for layer in self.range)
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
        for place, block in enumerate(self.layers):
            assert isinstance(block, Block)
            modules = tuple((name, type(module)) for name, module in block.named_modules())
            tensors = tuple((name, tensor.shape, tensor.dtype) for name, tensor in block.state_dict().items())
            first.setdefault((block.spec.kind, modules, tensors), place)
        return list(first.values())

    def forward(
        self,
        streams: Tensor,
        token_ids: Tensor,
        step: object,
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
        walk = self.walk(streams, token_ids, step, caches, only).finish()
        return walk.streams if self.hc_head is None else walk.x.require_values()

    def walk(
        self,
        streams: Tensor,
        token_ids: Tensor,
        step: object,
        caches: Sequence[LayerCache],
        only: Sequence[int] | None = None,
    ) -> Walk:
        """The pass of :meth:`forward`, sublayer by sublayer; behind the last one, ``x`` is the final collapse's."""
        places = range(len(self.layers)) if only is None else only
        blocks: list[Any] = [self.layers[place] for place in places]
        given = zip(blocks, places, strict=True)
        sublayers = [*chain(*(block.sublayers(token_ids, step, caches[place]) for block, place in given))]
        return Walk(sublayers, self.hc_head, streams, step, self.context.tokens(len(token_ids)))
