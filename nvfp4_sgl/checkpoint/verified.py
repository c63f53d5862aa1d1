"""The one check of a checkpoint directory: what ``inspect`` and ``doctor`` pass is what the server loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.quantization import check_quantization_config
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.config import ModelConfig, read_config_json


@dataclass(frozen=True)
class Verified:
    """A checkpoint whose headers match its configuration; ``raw`` is config.json."""

    raw: dict[str, Any]
    config: ModelConfig
    inventory: Inventory
    summary: CheckpointSummary


def verify(directory: str | Path) -> Verified:
    """Check config.json, every header and ``quantization_config`` in ``directory``; no values are read.

    Raises:
        ConfigError: config.json is absent, unreadable, not servable, or claims what the tensors are not.
        CheckpointError: a file or tensor is missing, superfluous, damaged, or of a wrong shape or dtype.
    """
    raw = read_config_json(directory)
    config = ModelConfig.from_dict(raw, source=str(Path(directory) / "config.json"))
    inventory = Inventory.open(directory)
    summary = inventory.verify(config)
    check_quantization_config(raw, summary)
    return Verified(raw, config, inventory, summary)
