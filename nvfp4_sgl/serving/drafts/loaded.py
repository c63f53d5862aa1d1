"""The base of draft models: weights of their own, loaded once by our own reader, and replaced in place."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch

from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.model.replace import replace_draft
from nvfp4_sgl.serving import stages
from nvfp4_sgl.serving.loading import LoadedOnce
from nvfp4_sgl.serving.model import rank_context


class LoadedDraft(LoadedOnce):
    """Base of the models that SGLang's workers run beside the target.

    Attributes:
        draft: what is loaded; ``None`` before.
    """

    kind = "draft"
    draft: MtpDraft | DsparkDraft | None

    def __init__(self, config: Any):
        super().__init__(config)
        self._like = torch.empty(0)  # SGLang constructs models under the device and dtype that it serves with
        self.draft = None

    @property
    def is_loaded(self) -> bool:
        return self.draft is not None

    @property
    def context(self) -> Context:
        """The context that the draft was built from."""
        assert self.draft is not None, "load_weights has not run"
        return self.draft.context

    @abstractmethod
    def build(self, context: Context) -> MtpDraft | DsparkDraft:
        """Load the draft from ``context.source``."""

    @abstractmethod
    def loaded_words(self) -> list[str]:
        """The draft in words, for the log."""

    def _load(self) -> None:
        with stages.stage("draft") as words:
            like = self._like
            reader = self.verified.draft_reader(like.device)
            context = rank_context(reader, self.model_config, self.choice, like, self.uniform_experts)
            self.draft = self.build(context)
            reader.finish(self.draft.unused)
            words += [*self.loaded_words(), f"{reader.nbytes / 1e9:.2f} GB stored"]

    @torch.no_grad()
    def replace_weights(self, found: Verified) -> None:
        """Load the draft of ``found``, which differs from the served one in values alone, into what is there.

        Raises:
            CheckpointError: something could not be read; what came before it is replaced, so nothing must run any more.
        """
        assert self.draft is not None, "load_weights has not run"
        reader = found.draft_reader(self.context.device)
        replace_draft(self.draft, replace(self.context, source=reader))
        reader.finish(self.draft.unused)
        self.verified = found
