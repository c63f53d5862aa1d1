"""The draft model that SGLang's EAGLE worker runs beside the target, under the name ``DeepseekV4ForCausalLMNextN``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.model.replace import replace_draft
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.serving import arguments, stages
from nvfp4_sgl.serving.model import OTHER_UPDATES, make_logits_processor, planned_backend, rank_context
from nvfp4_sgl.serving.sglang import models, settings
from nvfp4_sgl.targets.choose import choose, detect_target


class MtpForCausalLM(nn.Module):
    """A checkpoint's MTP block with the target's embedding and LM head.

    Between passes SGLang carries ``hidden_states`` [T, n * d]: the streams of the target behind its last layer, or the
    block's own.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = ""):
        super().__init__()
        self.config = config
        self.verified = arguments.served_here()
        self.model_config = self.verified.config
        mode = models.activation_mode(config)
        self.choice = choose(detect_target(), None if mode is None else ActivationMode(mode))
        self.uniform_experts = settings.environment_flag(arguments.UNIFORM_EXPERTS)
        self.logits_processor = make_logits_processor(config)
        self.start_layer, self.end_layer = 0, 1
        self._like = torch.empty(0)  # SGLang constructs models under the device and dtype that it serves with
        self.draft: MtpDraft | None = None
        self.vocabulary: tuple[nn.Module, nn.Module] | None = None

    @property
    def context(self) -> Context:
        """The context that the block was built from."""
        assert self.draft is not None, "load_weights has not run"
        return self.draft.context

    def set_embed_and_head(self, embed: nn.Module, head: nn.Module) -> None:
        """Take what :meth:`~nvfp4_sgl.serving.model.DeepseekV4ForCausalLM.get_embed_and_head` gives."""
        self.vocabulary = (embed, head)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the draft strictly through our own reader; SGLang's iterator is left alone."""
        if self.verified.is_dummy:
            raise UnsupportedError("--load-format dummy: expected no weights to load, found some; restart the server")
        if self.draft is not None:
            raise UnsupportedError(f"load_weights: the draft has its weights; {OTHER_UPDATES}")
        self._load()
        return {name for name, _ in self.named_parameters()}

    def post_load_weights(self) -> None:
        """Draw random weights: SGLang calls this, and not :meth:`load_weights`, with ``--load-format dummy``."""
        if not self.verified.is_dummy:
            raise UnsupportedError(f"post_load_weights: expected --load-format dummy; {OTHER_UPDATES}")
        self._load()

    def _load(self) -> None:
        with stages.stage("draft") as words:
            like = self._like
            reader = self.verified.draft_reader(like.device)
            self.draft = MtpDraft(rank_context(reader, self.model_config, self.choice, like, self.uniform_experts))
            reader.finish()
            words.append(f"MTP block, {reader.nbytes / 1e9:.2f} GB stored")

    @torch.no_grad()
    def replace_weights(self, found: Verified) -> None:
        """Load the draft of ``found``, which differs from the served one in values alone, into what is there.

        Raises:
            CheckpointError: something could not be read; what came before it is replaced, so nothing must run any more.
        """
        assert self.draft is not None, "load_weights has not run"
        reader = found.draft_reader(self.context.device)
        replace_draft(self.draft, replace(self.context, source=reader))
        reader.finish()
        self.verified = found

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
