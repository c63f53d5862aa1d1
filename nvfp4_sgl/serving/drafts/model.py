"""The draft model that SGLang's EAGLE worker runs beside the target, under the name ``DeepseekV4ForCausalLMNextN``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.serving.drafts.loaded import LoadedDraft
from nvfp4_sgl.serving.model import make_logits_processor, planned_backend


class MtpForCausalLM(LoadedDraft):
    """A checkpoint's MTP block with the target's embedding and LM head.

    Between passes SGLang carries ``hidden_states`` [T, n * d]: the streams of the target behind its last layer, or the
    block's own.
    """

    draft: MtpDraft | None

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__(config)
        self.logits_processor = make_logits_processor(config)
        self.start_layer, self.end_layer = 0, 1
        self.vocabulary: tuple[nn.Module, nn.Module] | None = None

    def build(self, context: Context) -> MtpDraft:
        """Load the block from ``context.source``."""
        return MtpDraft(context)

    def loaded_words(self) -> list[str]:
        """The draft in words, for the log."""
        return ["MTP block"]

    def set_embed_and_head(self, embed: nn.Module, head: nn.Module) -> None:
        """Take what :meth:`~nvfp4_sgl.serving.model.DeepseekV4ForCausalLM.get_embed_and_head` gives."""
        self.vocabulary = (embed, head)

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Tensor | None = None
    ) -> Any:
        """SGLang's entry: logits of the tokens after the next, and the block's streams to guess further with."""
        assert self.draft is not None and self.vocabulary is not None, "nothing is loaded"
        embed, head = self.vocabulary
        backend, streams = planned_backend(), forward_batch.spec_info.hidden_states
        ids = input_ids.clamp(min=0)  # a request may have failed (finite_logits.FAILED)
        hidden = embed(ids)
        if backend.plan is not None:
            seen = streams.view(len(ids), self.model_config.hc_mult, -1)
            hidden, own = self.draft(hidden, seen, ids, backend.plan, backend.caches[0])
            streams = own.flatten(1)
        return self.logits_processor(ids, hidden, head, forward_batch, hidden_states_before_norm=streams)
