"""The one check of a model directory, for ``inspect``, ``doctor`` and the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nvfp4_sgl.architectures import read_config
from nvfp4_sgl.checkpoint.drafts import Draft, verify_draft
from nvfp4_sgl.checkpoint.inventory import INDEX, Inventory
from nvfp4_sgl.checkpoint.quantization import check_manifest, check_quantization_config
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.config import ModelConfig, read_config_json

if TYPE_CHECKING:
    import torch

    from nvfp4_sgl.checkpoint.reader import CheckpointReader


@dataclass(frozen=True)
class Verified:
    """Tensors that match their configuration.

    Attributes:
        raw: config.json, overrides included.
        is_dummy: whether weights are random (:class:`nvfp4_sgl.synthetic.random_weights.RandomWeights`).
    """

    raw: dict[str, Any]
    config: ModelConfig
    inventory: Inventory
    summary: CheckpointSummary
    is_dummy: ClassVar[bool] = False

    def reader(self, device: torch.device | str = "cpu", say: Callable[[str], None] | None = None) -> CheckpointReader:
        """The reader of the tensors on ``device``, or on the CPU if that is no GPU.

        Args:
            say: takes lines that say how far reading is.
        """
        return self._opened(self.inventory, device, say)

    def draft(self) -> Draft | None:
        """The draft that is bundled, ``None`` if there is none.

        Raises:
            CheckpointError, ConfigError: it is not complete, as :func:`verify_draft` says.
        """
        return verify_draft(self.inventory, self.raw, self.config)

    def draft_reader(self, device: torch.device | str = "cpu") -> CheckpointReader:
        """The reader of the tensors of :meth:`draft`, as of :meth:`reader`."""
        return self._opened(self.draft_inventory(), device, of_draft=True)

    def draft_inventory(self) -> Inventory:
        """The inventory that has the tensors of :meth:`draft`, verified."""
        return self.inventory

    def _opened(
        self,
        inventory: Inventory,
        device: torch.device | str,
        say: Callable[[str], None] | None = None,
        of_draft: bool = False,
    ) -> CheckpointReader:
        from nvfp4_sgl.checkpoint.reader import reader_for

        return reader_for(inventory, device, say, of_draft=of_draft)

    def describe(self) -> str:
        """The source of the weights, in words."""
        return f"{self.summary.format} checkpoint {self.inventory.directory}"


def verify(directory: str | Path) -> Verified:
    """Check config.json, every header and what exporters say of them in ``directory``; no values are read.

    Raises:
        ConfigError: config.json is absent, unreadable, not servable, or claims what the tensors are not.
        CheckpointError: a file or tensor is missing, superfluous, damaged, or of a wrong shape or dtype.
    """
    raw = read_config_json(directory)
    config = read_config(raw, source=str(Path(directory) / "config.json"))
    inventory = Inventory.open(directory)
    summary = inventory.verify(config)
    check_quantization_config(raw, summary)
    check_manifest(inventory.directory, summary)
    return Verified(raw, config, inventory, summary)


def holds_weights(directory: str | Path) -> bool:
    """Whether there are files of weights in ``directory``, or an index of some."""
    return (Path(directory) / INDEX).exists() or any(Path(directory).glob("*.safetensors"))
