"""The base of draft models: weights of their own, loaded once by our own reader, and replaced in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.dspark import DsparkDraft
from nvfp4_sgl.model.mtp import MtpDraft
from nvfp4_sgl.model.replace import replace_draft
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.serving import arguments, stages
from nvfp4_sgl.serving.model import OTHER_UPDATES, rank_context
from nvfp4_sgl.serving.sglang import models, settings
from nvfp4_sgl.targets.choose import choose, detect_target


class LoadedDraft(nn.Module, ABC):
    """Base of the models that SGLang's workers run beside the target.

    Attributes:
        draft: what is loaded; ``None`` before.
    """

    draft: MtpDraft | DsparkDraft | None

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.verified = arguments.served_here()
        self.model_config = self.verified.config
        mode = models.activation_mode(config)
        self.choice = choose(detect_target(), None if mode is None else ActivationMode(mode))
        self.uniform_experts = settings.environment_flag(arguments.UNIFORM_EXPERTS)
        self._like = torch.empty(0)  # SGLang constructs models under the device and dtype that it serves with
        self.draft = None

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
