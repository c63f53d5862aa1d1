"""The draft that a checkpoint bundles under ``mtp.``: which kind it is, and whether its tensors are complete.

A server leaves it out unless ``--speculative-algorithm`` asks for it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.names import CONFIDENCE, DRAFT_COPIES, MTP_PREFIX, TensorSpec, dspark_specs, mtp_specs
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.config_fields import DSPARK
from nvfp4_sgl.draft_config import DsparkConfig
from nvfp4_sgl.errors import CheckpointError, ConfigError
from nvfp4_sgl.files import shown


class DraftKind(enum.StrEnum):
    """The kinds of drafts; each has a tensor of ``mtp.0`` that the other lacks."""

    MTP = "MTP"
    DSPARK = "DSpark"

    @property
    def algorithm(self) -> str:
        """The value of ``--speculative-algorithm`` that asks for it."""
        return next(name for name, kind in DRAFTS.items() if kind is self)

    @property
    def words(self) -> str:
        """Such a draft in a sentence, with its article."""
        return f"{'an' if self is DraftKind.MTP else 'a'} {self.value} draft"

    @property
    def mark(self) -> str:
        """The matrix that tells the kind."""
        return f"{MTP_PREFIX}0.{'e_proj' if self is DraftKind.MTP else 'main_proj'}"


DRAFTS = {"EAGLE": DraftKind.MTP, "NEXTN": DraftKind.MTP, "DSPARK": DraftKind.DSPARK}
"""Values of ``--speculative-algorithm``, in capitals, and the draft that each needs."""


@dataclass(frozen=True)
class Draft:
    """A complete draft.

    Attributes:
        specs: its tensors, by stem or name. storages: what each of its matrices is stored as, by stem.
        stages: blocks. block: tokens that DSpark drafts at once; ``None`` for MTP, whose steps a flag counts.
        tensors, nbytes: of all that is stored.
        not_read: names of the tensors that no server reads: DSpark's confidence head, copies of embedding and head.
    """

    kind: DraftKind
    specs: Mapping[str, TensorSpec]
    storages: Mapping[str, Storage]
    stages: int
    block: int | None
    tensors: int
    nbytes: int
    not_read: tuple[str, ...]

    @property
    def projections(self) -> list[TensorSpec]:
        """The matrices in front of the blocks: MTP's e_proj and h_proj, DSpark's main_proj."""
        return [spec for spec in self.specs.values() if spec.role.is_matrix and spec.name.count(".") == 2]

    @property
    def stored(self) -> str:
        """The matrices by their storage, in words: ``2304 in MXFP4, 25 in FP8``."""
        counts = Counter(self.storages.values())
        return ", ".join(f"{count} in {storage.value}" for storage, count in counts.most_common())

    def describe(self) -> str:
        """Kind, storage, size and flag, in words."""
        shape = "one block" if self.block is None else f"{self.stages} stages, blocks of {self.block} tokens"
        words = f"{self.kind}, {shape}: {self.tensors} tensors, {self.nbytes / 1e6:,.2f} MB; matrices: {self.stored}"
        if self.not_read:
            words += f"; not read: {', '.join(self.not_read)}"
        return f"{words}; for --speculative-algorithm {self.kind.algorithm}"


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


def claimed_kind(raw: Mapping[str, Any]) -> DraftKind | None:
    """The kind of the draft that config.json speaks of, ``None`` if it speaks of none."""
    if any(field.startswith(DSPARK) for field in raw):
        return DraftKind.DSPARK
    return DraftKind.MTP if raw.get("num_nextn_predict_layers") else None


def draft_specs(
    kind: DraftKind, raw: Mapping[str, Any], config: ModelConfig, *, source: str = "config.json"
) -> dict[str, TensorSpec]:
    """Logical tensors of a draft, by stem or name. source: the file of ``raw``, for messages.

    Raises:
        ConfigError: DSpark's fields of config.json are absent or wrong, or fields say that MTP is not one block with a
            window, or is DSpark.
    """
    if kind is DraftKind.MTP:
        _check_mtp(raw, config, source)
        return mtp_specs(config)
    return dspark_specs(config, DsparkConfig.parse(raw, config, source))


def _check_mtp(raw: Mapping[str, Any], config: ModelConfig, source: str) -> None:
    """Refuse fields of config.json that say of an MTP draft what is not implemented."""
    blocks, layers = config.num_nextn_predict_layers, config.num_hidden_layers
    if blocks > 1:
        raise ConfigError(
            f"{source}: field 'num_nextn_predict_layers': expected 1, the block of an MTP draft, found {blocks};"
            " more are not implemented: serve without --speculative-algorithm"
        )
    if of_dspark := [field for field in raw if field.startswith(DSPARK)]:
        raise ConfigError(
            f"{source}: field {of_dspark[0]!r}: expected none of a DSpark draft, as the tensors are those of an MTP"
            f" draft ('{DraftKind.MTP.mark}'), found {shown(raw[of_dspark[0]])}; fetch config.json again, or serve"
            " without --speculative-algorithm"
        )
    if any(raw["compress_ratios"][layers:]):
        raise ConfigError(
            f"{source}: field 'compress_ratios': expected {layers} entries, and a 0 for the block of an MTP draft,"
            f" which has a window alone, found {shown(raw['compress_ratios'])}; serve without --speculative-algorithm"
        )


def verify_draft(inventory: Inventory, raw: Mapping[str, Any], config: ModelConfig) -> Draft | None:
    """Demand exactly the tensors of the draft that is bundled; ``None`` if there is none.

    Raises:
        CheckpointError: lists missing and superfluous tensors, wrong shapes and wrong dtypes.
        ConfigError: DSpark's fields of config.json are absent or wrong.
    """
    kind = draft_kind(inventory)
    if kind is None:
        return None
    sizes = {name: entry.nbytes for name, entry in inventory.entries.items() if name.startswith(MTP_PREFIX)}
    names = [name for name in sizes if not DRAFT_COPIES.match(name)]
    source = str(inventory.directory / "config.json")
    storages = inventory.verify_part(draft_specs(kind, raw, config, source=source).values(), names)
    return draft_of(kind, raw, config, storages, sizes, source=source)


def draft_of(
    kind: DraftKind,
    raw: Mapping[str, Any],
    config: ModelConfig,
    storages: Mapping[str, Storage],
    sizes: Mapping[str, int],
    *,
    source: str,
) -> Draft:
    """A draft whose matrices are in ``storages``, and whose tensors take as many bytes as ``sizes`` says by name.

    source: the file of ``raw``, for messages.

    Raises:
        ConfigError: as :func:`draft_specs`.
    """
    specs, stages, block = draft_specs(kind, raw, config, source=source), 1, None
    if kind is DraftKind.DSPARK:
        dspark = DsparkConfig.parse(raw, config, source)
        stages, block = dspark.stages, dspark.block
    not_read = tuple(name for name in sizes if DRAFT_COPIES.match(name) or name.endswith(CONFIDENCE))
    return Draft(kind, specs, storages, stages, block, len(sizes), sum(sizes.values()), not_read)
