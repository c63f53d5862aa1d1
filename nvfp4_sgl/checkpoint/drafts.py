"""The draft that a checkpoint bundles under ``mtp.``: which kind it is, and whether its tensors are complete.

A server leaves it out; ``inspect`` and the references of drafts read it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.names import DRAFT_COPIES, MTP_PREFIX, TensorSpec, dspark_specs, mtp_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import CheckpointError


class DraftKind(enum.Enum):
    """The kinds of drafts; each has a tensor of ``mtp.0`` that the other lacks."""

    MTP = "MTP"
    DSPARK = "DSpark"

    @property
    def mark(self) -> str:
        """The matrix that tells the kind."""
        return f"{MTP_PREFIX}0.{'e_proj' if self is DraftKind.MTP else 'main_proj'}"


@dataclass(frozen=True)
class Draft:
    """A complete draft.

    Attributes:
        storages: what each of its matrices is stored as, by stem.
    """

    kind: DraftKind
    storages: Mapping[str, Storage]


def draft_kind(inventory: Inventory) -> DraftKind | None:
    """The kind of the draft that is bundled, ``None`` if there is none.

    Raises:
        CheckpointError: there are tensors of ``mtp.`` by which it is neither, or both.
    """
    found = [kind for kind in DraftKind if inventory.stored(kind.mark)]
    if not found and not any(name.startswith(MTP_PREFIX) for name in inventory.entries):
        return None
    if len(found) != 1:
        marks = " or ".join(f"'{kind.mark}' ({kind.value})" for kind in DraftKind)
        seen = " and ".join(f"'{kind.mark}'" for kind in found) or "neither"
        raise CheckpointError(f"{inventory.directory}: draft: expected {marks}, found {seen}; fetch the files again")
    return found[0]


def draft_specs(kind: DraftKind, raw: Mapping[str, Any], config: ModelConfig) -> dict[str, TensorSpec]:
    """Logical tensors of a draft, by stem or name.

    Raises:
        ConfigError: DSpark's fields of config.json are absent or wrong.
    """
    if kind is DraftKind.MTP:
        return mtp_specs(config)
    return dspark_specs(config, DsparkConfig.parse(raw, config))


def verify_draft(inventory: Inventory, raw: Mapping[str, Any], config: ModelConfig) -> Draft | None:
    """Demand exactly the tensors of the draft that is bundled; ``None`` if there is none.

    Raises:
        CheckpointError: lists missing and superfluous tensors, wrong shapes and wrong dtypes.
        ConfigError: DSpark's fields of config.json are absent or wrong.
    """
    kind = draft_kind(inventory)
    if kind is None:
        return None
    names = [name for name in inventory.entries if name.startswith(MTP_PREFIX) and not DRAFT_COPIES.match(name)]
    return Draft(kind, inventory.verify_part(draft_specs(kind, raw, config).values(), names))
