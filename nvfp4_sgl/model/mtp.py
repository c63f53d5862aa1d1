"""The MTP draft: one block between the target's streams and its LM head (specification §7)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.checkpoint.names import mtp_specs
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Context, Form, SiteNames
from nvfp4_sgl.model.layer import Block, Walk
from nvfp4_sgl.weights.gemms import DraftMatrices


class MtpDraft(nn.Module):
    """Guesses the token after the next. Construction loads ``mtp.0``; embedding and LM head are the target's.

    Attributes:
        unused: matrices of the checkpoint that are not loaded, by their names without suffix.

    Raises:
        UnsupportedError: the target of ``context`` does not draft so.
    """

    unused: tuple[str, ...] = ()

    def __init__(self, context: Context):
        super().__init__()
        if context.boundaries.mtp_input is None:
            raise UnsupportedError("MTP drafts: this target computes none; serve without --speculative-algorithm")
        layer = context.config.draft_layer(0)
        specs = mtp_specs(context.config)
        e_proj, h_proj = (specs[f"{layer.stem}.{name}"] for name in ("e_proj", "h_proj"))
        self.context = replace(context, draft=DraftMatrices(1, (e_proj, h_proj), by_stream=(h_proj.name,)))
        self.input = context.boundaries.mtp_input(context, layer.stem)
        self.block = Block(context, layer)
        names = SiteNames(f"{layer.stem}.hc_head", f"{layer.stem}.norm.weight", 0)
        self.hc_head = context.boundaries.site(context, names, Form.VALUES)

    def forward(
        self, embedded: Tensor, streams: Tensor, token_ids: Tensor, step: object, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """(hidden states [T, d] for the LM head, the block's own streams [T, n, d]).

        Row t stands at position t of the sequence and guesses token t + 2. To guess further, feed the block's streams
        and the token just guessed to the next position.

        Args:
            embedded: [T, d], embeddings of tokens t + 1, ``token_ids``.
            streams: [T, n, d] behind the target's last layer, in front of its final collapse.
            step: the planned pass, at positions t.
        """
        walk = Walk(
            self.block.sublayers(token_ids, step, cache),
            self.hc_head,
            self.input(embedded, streams),
            step,
            self.context.tokens(len(token_ids)),
        ).finish()
        return walk.x.require_values(), walk.all_streams()
