"""The one check of a model directory: what ``inspect`` and ``doctor`` pass is what the server loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4_sgl.checkpoint.inventory import INDEX, Inventory
from nvfp4_sgl.checkpoint.overrides import FLAG, completed
from nvfp4_sgl.checkpoint.quantization import check_manifest, check_quantization_config
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.config import ModelConfig, read_config_json

if TYPE_CHECKING:
    import torch

    from nvfp4_sgl.checkpoint.reader import CheckpointReader


@dataclass(frozen=True)
class Verified:
    """Tensors that match their configuration: those of a checkpoint, or random ones.

    Attributes:
        raw: config.json, overrides included.
        is_dummy: weights are random, whatever files are in the directory.
    """

    raw: dict[str, Any]
    config: ModelConfig
    inventory: Inventory
    summary: CheckpointSummary
    is_dummy: bool = False

    def reader(self, device: torch.device | str = "cpu", say: Callable[[str], None] | None = None) -> CheckpointReader:
        """What hands the tensors out on ``device``, or on the CPU if that is no GPU; random ones are made there.

        Args:
            say: takes lines that say how far reading is.
        """
        import torch

        from nvfp4_sgl.checkpoint.dummy import DummyReader
        from nvfp4_sgl.checkpoint.reader import CheckpointReader
        from nvfp4_sgl.checkpoint.staged_files import StagedFiles

        if self.is_dummy:
            return DummyReader(self.inventory, device, say=say)
        device = torch.device(device)
        return CheckpointReader(self.inventory, StagedFiles(device) if device.type == "cuda" else None, say)

    def describe(self) -> str:
        """Where the weights come from, in words."""
        if self.is_dummy:
            return f"RANDOM ({self.summary.format}, --load-format dummy): this is no model, its answers mean nothing"
        return f"{self.summary.format} checkpoint {self.inventory.directory}"


def verify(directory: str | Path) -> Verified:
    """Check config.json, every header and what exporters say of them in ``directory``; no values are read.

    Raises:
        ConfigError: config.json is absent, unreadable, not servable, or claims what the tensors are not.
        CheckpointError: a file or tensor is missing, superfluous, damaged, or of a wrong shape or dtype.
    """
    raw = read_config_json(directory)
    config = ModelConfig.from_dict(raw, source=str(Path(directory) / "config.json"))
    return _verified(raw, config, Inventory.open(directory))


def verify_dummy(directory: str | Path, overrides: Mapping[str, Any] | None = None) -> Verified:
    """Random weights for ``directory``'s config.json; other files are not looked at.

    Args:
        overrides: fields that replace config.json's; what depends on them follows (:func:`.overrides.completed`).

    Raises:
        ConfigError: config.json is absent, unreadable or not servable, or claims a storage that is not supported.
    """
    from nvfp4_sgl.checkpoint.dummy import dummy_inventory

    raw, source = read_config_json(directory), str(Path(directory) / "config.json")
    if overrides:
        raw, source = raw | completed(raw, overrides), f"{source} with {FLAG}"
    config = ModelConfig.from_dict(raw, source=source)
    return _verified(raw, config, dummy_inventory(raw, config, Path(directory)), is_dummy=True)


def holds_weights(directory: str | Path) -> bool:
    """Whether there are files of weights in ``directory``, or an index of some."""
    return (Path(directory) / INDEX).exists() or any(Path(directory).glob("*.safetensors"))


def _verified(raw: dict[str, Any], config: ModelConfig, inventory: Inventory, *, is_dummy: bool = False) -> Verified:
    summary = inventory.verify(config)
    check_quantization_config(raw, summary)
    if not is_dummy:
        check_manifest(inventory.directory, summary)
    return Verified(raw, config, inventory, summary, is_dummy)
