"""Random weights for a config.json, with no files behind them: the tensors that its checkpoint would have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nvfp4_sgl.architectures import read_config
from nvfp4_sgl.checkpoint.drafts import Draft, claimed_kind, draft_of, draft_specs
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.names import Role, TensorSpec, tensor_specs
from nvfp4_sgl.checkpoint.overrides import FLAG, completed
from nvfp4_sgl.checkpoint.quantization import check_quantization_config
from nvfp4_sgl.checkpoint.safetensors_header import ITEM_BYTES, Entry
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.checkpoint.summary import CheckpointSummary
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.config import ModelConfig, read_config_json
from nvfp4_sgl.synthetic.claimed import claimed_storages

if TYPE_CHECKING:
    import torch

    from nvfp4_sgl.checkpoint.reader import CheckpointReader

FILE = Path("(random weights)")
"""What errors name in place of a file."""


@dataclass(frozen=True)
class RandomWeights(Verified):
    """Random tensors that match a configuration, whatever files are in the directory."""

    is_dummy: ClassVar[bool] = True

    def _opened(
        self,
        inventory: Inventory,
        device: torch.device | str,
        say: Callable[[str], None] | None = None,
        of_draft: bool = False,
    ) -> CheckpointReader:
        """A reader that draws the tensors."""
        from nvfp4_sgl.synthetic.dummy import DummyReader

        return DummyReader(inventory, device, say=say, of_draft=of_draft)

    def draft(self) -> Draft | None:
        """The draft that config.json speaks of, in the storages that it claims; no values are drawn.

        Raises:
            ConfigError: DSpark's fields are absent or wrong.
        """
        kind = claimed_kind(self.raw)
        if kind is None:
            return None
        source = str(self.inventory.directory / "config.json")
        specs = draft_specs(kind, self.raw, self.config, source=source)
        storages = claimed_storages(self.raw, self.config, specs)
        sizes = {entry.name: entry.nbytes for entry in _all_entries(specs, storages)}
        return draft_of(kind, self.raw, self.config, storages, sizes, source=source)

    def draft_inventory(self) -> Inventory:
        """The inventory of the tensors of :meth:`draft` alone."""
        draft = self.draft()
        assert draft is not None, "what a server has checked before"
        directory = self.inventory.directory
        inventory = Inventory(directory, {entry.name: entry for entry in _all_entries(draft.specs, draft.storages)})
        summary = CheckpointSummary(directory)
        for spec in draft.specs.values():
            summary.add(spec, draft.storages.get(spec.name), 0)
        inventory.config, inventory.summary = self.config, summary
        return inventory

    def describe(self) -> str:
        """The weights' origin, in words."""
        return f"RANDOM ({self.summary.format}, --load-format dummy): this is no model, its answers mean nothing"


def verify_dummy(directory: str | Path, overrides: Mapping[str, Any] | None = None) -> RandomWeights:
    """Random weights for ``directory``'s config.json; other files are not looked at.

    Args:
        overrides: fields that replace config.json's; what depends on them follows (``completed``).

    Raises:
        ConfigError: config.json is absent, unreadable or not servable, or claims a storage that is not supported.
    """
    raw, source = read_config_json(directory), str(Path(directory) / "config.json")
    if overrides:
        raw, source = raw | completed(raw, overrides), f"{source} with {FLAG}"
    config = read_config(raw, source=source)
    inventory = dummy_inventory(raw, config, Path(directory))
    summary = inventory.verify(config)
    check_quantization_config(raw, summary)
    return RandomWeights(raw, config, inventory, summary)


def dummy_inventory(raw: Mapping[str, Any], config: ModelConfig, directory: Path) -> Inventory:
    """The tensors of a checkpoint of ``config``, not verified yet.

    Args:
        raw: config.json; its ``quantization_config`` decides the storages (:func:`claimed_storages`).
        directory: for errors.

    Raises:
        ConfigError: of :func:`claimed_storages`.
    """
    entries = _all_entries(tensor_specs(config), claimed_storages(raw, config))
    return Inventory(directory, {entry.name: entry for entry in entries})


def _all_entries(specs: Mapping[str, TensorSpec], storages: Mapping[str, Storage]) -> list[Entry]:
    return [entry for spec in specs.values() for entry in _entries(spec, storages.get(spec.name, Storage.PLAIN))]


def _entries(spec: TensorSpec, storage: Storage) -> Iterator[Entry]:
    if not spec.role.is_matrix:
        yield _entry(spec.key, {Role.FP32: "F32", Role.TID2EID: "I64"}.get(spec.role, "BF16"), spec.shape)
        return
    for part in storage.decoder.parts:
        if not part.optional:
            yield _entry(f"{spec.name}.{part.suffixes[0]}", part.dtypes[0], part.shapes(*spec.shape)[0])


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, FILE, dtype, shape, 0, math.prod(shape) * ITEM_BYTES[dtype])
