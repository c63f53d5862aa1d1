"""The DSpark draft: stages that attend to what the target has seen, and guess a block at once (specification §7)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.checkpoint.names import dspark_specs
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Context, DsparkBoundaries, Form, SiteNames
from nvfp4_sgl.model.layer import Block, Walk
from nvfp4_sgl.weights.gemms import DraftMatrices


class DsparkDraft(nn.Module):
    """Construction loads ``mtp.*`` but the confidence head, which static verification does not ask.

    Embedding and LM head are the target's.

    Attributes:
        unused: matrices of the checkpoint that are not loaded, by their names without suffix.

    Raises:
        UnsupportedError: the target of ``context`` does not draft so.
    """

    def __init__(self, context: Context, dspark: DsparkConfig):
        super().__init__()
        parts = context.boundaries.dspark
        if parts is None:
            raise UnsupportedError("DSpark drafts: this target computes none; serve without --speculative-algorithm")
        layers = [context.config.draft_layer(stage) for stage in range(dspark.stages)]
        first, last = layers[0].stem, layers[-1].stem
        main_proj = dspark_specs(context.config, dspark)[f"{first}.main_proj"]
        matrices = DraftMatrices(dspark.stages, (main_proj,), block=dspark.block)
        self.context, self.dspark = replace(context, draft=matrices), dspark
        self.parts: DsparkBoundaries = parts
        self.input = parts.input(context, first)
        self.stages = nn.ModuleList(Block(context, layer) for layer in layers)
        names = SiteNames(f"{last}.hc_head", f"{last}.norm.weight", 0)
        self.hc_head = context.boundaries.site(context, names, Form.VALUES)
        self.unused = (f"{last}.confidence_head.proj",)
        self.guesses = parts.guesses(context, last)

    def means(self, captured: Sequence[Tensor]) -> Tensor:
        """Input of :meth:`inject`, from the streams [T, n, d] behind each of the target's captured layers."""
        tokens, _, width = captured[0].shape
        means = captured[0].new_empty(tokens, len(captured) * width)
        for streams, columns in zip(captured, means.split(width, dim=1), strict=True):
            self.parts.capture(streams, columns)
        return means

    def inject(self, means: Tensor, step: object, caches: Sequence[LayerCache]) -> None:
        """Write what every stage keeps of tokens that the target has processed.

        Args:
            means: [T, layers * d], the mean streams behind the target's captured layers.
            step: a pass over the tokens, the target's own or one that is planned over the same slots.
            caches: of each stage.
        """
        layers = [stage.attn for stage in self.stages if isinstance(stage, Block)]
        x = self.input(means, functools.reduce(operator.or_, (attention.takes for attention in layers)))
        for attention, cache in zip(layers, caches, strict=True):
            attention.prepare(attention.project_x(x), x, step, cache, attention.project_q.takes)

    def forward(self, streams: Tensor, token_ids: Tensor, step: object, caches: Sequence[LayerCache]) -> Tensor:
        """Hidden states [T, d] of a block for the LM head.

        Args:
            streams: [T, n, d], embeddings of the anchor and of noise tokens, ``token_ids``.
            step: the pass at the positions behind the last injected one, planned as a block.
        """
        sublayers = [
            sublayer
            for stage, cache in zip(self.stages, caches, strict=True)
            if isinstance(stage, Block)
            for sublayer in stage.sublayers(token_ids, step, cache)
        ]
        tokens = self.context.tokens(len(token_ids))
        return Walk(sublayers, self.hc_head, streams, step, tokens).finish().x.require_values()
