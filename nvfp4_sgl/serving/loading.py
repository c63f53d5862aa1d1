"""The base of the models that SGLang constructs: what is served, and one strict load by our own reader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.serving import arguments
from nvfp4_sgl.serving.sglang import models, settings
from nvfp4_sgl.targets.choose import choose, detect_target

OTHER_UPDATES = "weights are replaced by /update_weights_from_disk alone"
"""The remedy in errors of other ways to update weights."""


class LoadedOnce(nn.Module, ABC):
    """Base of the model and of the drafts that SGLang's workers run.

    Attributes:
        config: SGLang's. verified: the checkpoint that is served. model_config: what its config.json states.
        choice: the target's boundaries and the mode. uniform_experts: whether routing is even, for measurements.
    """

    kind: ClassVar[str]
    """What it is, in errors."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.verified = arguments.served_here()
        self.model_config = self.verified.config
        mode = models.activation_mode(config)
        self.choice = choose(detect_target(), None if mode is None else ActivationMode(mode))
        self.uniform_experts = settings.environment_flag(arguments.UNIFORM_EXPERTS)

    @property
    @abstractmethod
    def is_loaded(self) -> bool:
        """Whether the weights are there."""

    @abstractmethod
    def _load(self) -> None:
        """Read the weights of :attr:`verified`, or draw them."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the checkpoint strictly through our own reader.

        SGLang's iterator is left alone: it neither checks that every tensor is used nor sees what a shard lacks.

        Raises:
            UnsupportedError: weights are random or there already.
        """
        if self.verified.is_dummy:
            raise UnsupportedError("--load-format dummy: expected no weights to load, found some; restart the server")
        if self.is_loaded:
            raise UnsupportedError(f"load_weights: the {self.kind} has its weights; {OTHER_UPDATES}")
        self._load()
        return {name for name, _ in self.named_parameters()}

    def post_load_weights(self) -> None:
        """Draw random weights: SGLang calls this, and not :meth:`load_weights`, with ``--load-format dummy``.

        Raises:
            UnsupportedError: weights are read from files.
        """
        if not self.verified.is_dummy:
            raise UnsupportedError(f"post_load_weights: expected --load-format dummy; {OTHER_UPDATES}")
        self._load()
