"""The DSpark draft: stages that attend to what the target has seen, and guess a block at once (specification §7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.checkpoint.names import dspark_specs
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Context, Form, SiteNames
from nvfp4_sgl.model.layer import Block, Walk
from nvfp4_sgl.ops.drafts import draft_greedily, markov_bias
from nvfp4_sgl.weights.gemms import DraftMatrices
from nvfp4_sgl.weights.source import frozen


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
        if context.boundaries.dspark_input is None:
            raise UnsupportedError("DSpark drafts: this target computes none; serve without --speculative-algorithm")
        layers = [context.config.draft_layer(stage) for stage in range(dspark.stages)]
        first, last = layers[0].stem, layers[-1].stem
        main_proj = dspark_specs(context.config, dspark)[f"{first}.main_proj"]
        matrices = DraftMatrices(dspark.stages, (main_proj,), block=dspark.block)
        self.context, self.dspark = replace(context, draft=matrices), dspark
        self.input = context.boundaries.dspark_input(context, first)
        self.stages = nn.ModuleList(Block(context, layer) for layer in layers)
        names = SiteNames(f"{last}.hc_head", f"{last}.norm.weight", 0)
        self.hc_head = context.boundaries.site(context, names, Form.VALUES)
        self.unused = (f"{last}.confidence_head.proj",)
        self.w1, self.w2 = (
            frozen(context.read(f"{last}.markov_head.{name}.weight")) for name in ("markov_w1", "markov_w2")
        )

    def inject(self, captured: Sequence[Tensor], step: object, caches: Sequence[LayerCache]) -> None:
        """Write what every stage keeps of tokens that the target has processed.

        Args:
            captured: [T, n, d], the target's streams behind each of its captured layers; n is 1 where they are means.
            step: the planned pass, at the tokens' positions.
            caches: of each stage.
        """
        for stage, cache in zip(self.stages, caches, strict=True):
            assert isinstance(stage, Block)
            attention = stage.attn
            x = self.input(captured, attention.takes)
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

    def bias(self, previous: Tensor) -> Tensor:
        """The bias of logits by the tokens before, int [B]: fp32 [B, vocabulary]."""
        return markov_bias(previous, self.w1, self.w2)

    def choose(self, logits: Tensor, anchor: Tensor) -> Tensor:
        """Greedy tokens int64 [B, block], from the LM head's logits [B, block, vocabulary] and int [B] anchors."""
        return draft_greedily(logits, anchor, self.w1, self.w2)
