"""The draft model that SGLang's DSpark worker runs beside the target, as ``DeepseekV4ForCausalLMDSpark``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Context, DsparkGuesses
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.serving import arguments, stages
from nvfp4_sgl.serving.model import OTHER_UPDATES, planned_backend, rank_context
from nvfp4_sgl.serving.sglang import models, scheduling, settings
from nvfp4_sgl.targets.choose import choose, detect_target


class DsparkForCausalLM(nn.Module):
    """A checkpoint's DSpark draft with the target's embedding and LM head.

    SGLang reads ``gamma``, ``sample_from_anchor``, ``num_stages``, ``markov_head`` and ``confidence_head``, and calls
    :meth:`attach_shared_modules`, :meth:`forward` and :meth:`compute_base_logits`. The context of its stages is written
    by the target's passes (:mod:`.dspark_context`).

    Attributes:
        gamma: tokens of a block, as served.
        sample_from_anchor: whether a block's first row is that of the token which is decided.
    """

    sample_from_anchor = True
    confidence_head = None
    """Verification is static: nobody asks how likely a guess is."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.verified = arguments.served_here()
        self.model_config = self.verified.config
        fields = DsparkConfig.parse(self.verified.raw, self.model_config)
        self.dspark = replace(fields, block=settings.draft_block())
        mode = models.activation_mode(config)
        self.choice = choose(detect_target(), None if mode is None else ActivationMode(mode))
        self.gamma, self.num_stages = self.dspark.block, self.dspark.stages
        self.start_layer, self.end_layer = 0, self.num_stages
        self.draft: DsparkDraft | None = None
        self.vocabulary: tuple[Tensor, Tensor] | None = None

    @property
    def context(self) -> Context:
        """The context that the stages were built from."""
        assert self.draft is not None, "load_weights has not run"
        return self.draft.context

    @property
    def markov_head(self) -> DsparkGuesses:
        """What SGLang hands to the hook :func:`.dspark_accept.guess`."""
        assert self.draft is not None, "load_weights has not run"
        return self.draft.guesses

    def attach_shared_modules(self, *, embed_tokens: Any, lm_head: Any) -> None:
        """Take the weights of the target's."""
        self.vocabulary = (embed_tokens.weight, lm_head.weight)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the draft strictly through our own reader; SGLang's iterator is left alone."""
        if self.draft is not None:
            raise UnsupportedError(f"load_weights: the draft has its weights; {OTHER_UPDATES}")
        with stages.stage("draft") as words:
            like = torch.empty(0)  # SGLang loads under the device and dtype that it serves with
            reader = self.verified.draft_reader(like.device)
            draft = self.build(rank_context(reader, self.model_config, self.choice, like, uniform_experts=False))
            reader.finish(draft.unused)
            words.append(f"DSpark, {self.num_stages} stages, blocks of {self.gamma} tokens")
            words.append(f"{reader.nbytes / 1e9:.2f} GB stored")
            words.append("confidence head left out: verification is static")
        return {name for name, _ in self.named_parameters()}

    def build(self, context: Context) -> DsparkDraft:
        """Load the draft from ``context.source``."""
        self.draft = DsparkDraft(context, self.dspark)
        self.embedding = context.boundaries.embed(context)
        return self.draft

    def forward_embed(self, input_ids: Tensor) -> Tensor:
        """Streams [T, n, d] of a block's tokens, ids of the vocabulary. SGLang embeds nothing where this is."""
        assert self.vocabulary is not None, "nothing is attached"
        return self.embedding.embed(input_ids, self.vocabulary[0])

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
        return self.draft.guesses.logits(hidden, self.vocabulary[1]), hidden
