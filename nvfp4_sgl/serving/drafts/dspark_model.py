"""The draft model that SGLang's DSpark worker runs beside the target, as ``DeepseekV4ForCausalLMDSpark``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.model.contract import Context, DsparkGuesses
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.serving.drafts.loaded import LoadedDraft
from nvfp4_sgl.serving.model import planned_backend
from nvfp4_sgl.serving.sglang import parallel, scheduling, settings


class DsparkForCausalLM(LoadedDraft):
    """A checkpoint's DSpark draft with the target's embedding and LM head.

    SGLang reads ``gamma``, ``sample_from_anchor``, ``num_stages``, ``markov_head`` and ``confidence_head``, and calls
    :meth:`attach_shared_modules`, :meth:`forward` and :meth:`compute_base_logits`. The context of its stages is written
    by the target's passes (:mod:`.dspark_context`).

    Attributes:
        gamma: tokens of a block, as served.
        sample_from_anchor: whether a block's first row is that of the token which is decided.
    """

    draft: DsparkDraft | None
    sample_from_anchor = True
    confidence_head = None
    """Verification is static: nobody asks how likely a guess is."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__(config)
        fields = DsparkConfig.parse(self.verified.raw, self.model_config)
        self.dspark = replace(fields, block=settings.draft_block())
        self.gamma, self.num_stages = self.dspark.block, self.dspark.stages
        self.start_layer, self.end_layer = 0, self.num_stages
        self.vocabulary: tuple[Any, Any] | None = None

    @property
    def markov_head(self) -> DsparkGuesses:
        """Part of the draft that SGLang hands to the hook :func:`.dspark_accept.guess`."""
        assert self.draft is not None, "load_weights has not run"
        return self.draft.guesses

    def attach_shared_modules(self, *, embed_tokens: Any, lm_head: Any) -> None:
        """Take the target's modules."""
        self.vocabulary = (embed_tokens, lm_head)

    def build(self, context: Context) -> DsparkDraft:
        """Load the stages and heads from ``context.source``."""
        self.draft = DsparkDraft(context, self.dspark)
        self.embedding = context.boundaries.embed(context)
        return self.draft

    def loaded_words(self) -> list[str]:
        """The draft in words, for the log."""
        return [
            f"DSpark, {self.num_stages} stages, blocks of {self.gamma} tokens",
            "confidence head left out: verification is static",
        ]

    def forward_embed(self, input_ids: Tensor) -> Tensor:
        """Streams [T, n, d] of a block's tokens, ids of the vocabulary. SGLang embeds nothing where this is."""
        assert self.vocabulary is not None, "nothing is attached"
        embed = self.vocabulary[0]
        if self.context.parallel.size == 1:
            return self.embedding.embed(input_ids, embed.weight)
        return self.embedding.expand(embed(input_ids))

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: Any, input_embeds: Tensor | None = None
    ) -> Any:
        """SGLang's entry: hidden states of blocks, for :meth:`compute_base_logits`."""
        assert self.draft is not None, "load_weights has not run"
        backend = planned_backend()
        ids = input_ids.clamp(min=0)  # a request may have failed (finite_logits.FAILED)
        hidden = self.draft(self.forward_embed(ids), ids, backend.plan, backend.caches)
        return scheduling.hidden_output(hidden)

    def compute_base_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(fp32 [T, vocabulary] without the bias of tokens before, what a confidence head reads); hidden [T, d]."""
        assert self.draft is not None and self.vocabulary is not None, "nothing is attached"
        logits = self.draft.guesses.logits(hidden, self.vocabulary[1].weight)
        if self.context.parallel.size > 1:
            logits = parallel.tp_gather_columns(logits)[:, : self.context.config.vocab_size]
        return logits, hidden
