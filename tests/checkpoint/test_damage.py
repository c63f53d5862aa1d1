"""Every way to break a checkpoint stops the load with one error that names the culprit."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.quantization import check_quantization_config
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.config import ModelConfig, read_config_json
from nvfp4_sgl.errors import Nvfp4SglError
from tests.support.damage import DAMAGES, copy_checkpoint, damaged_copy


def verify(directory: Path) -> Inventory:
    config = ModelConfig.from_dir(directory)
    inventory = Inventory.open(directory)
    check_quantization_config(read_config_json(directory), inventory.verify(config))
    return inventory


def read_all(inventory: Inventory) -> None:
    reader = CheckpointReader(inventory)
    for name in inventory.entries:
        if not name.startswith("mtp."):
            reader.read(name)
    reader.finish()


def test_an_undamaged_copy_loads(tiny: dict[str, Path], tmp_path: Path) -> None:
    for format, directory in tiny.items():
        read_all(verify(copy_checkpoint(directory, tmp_path / format)))


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named(tiny: dict[str, Path], tmp_path: Path, name: str) -> None:
    directory = damaged_copy(tiny["nvfp4-full"], tmp_path / "damaged", name)
    damage = DAMAGES[name]
    if damage.needs_values:
        inventory = verify(directory)
        with pytest.raises(Nvfp4SglError) as caught:
            read_all(inventory)
    else:
        with pytest.raises(Nvfp4SglError) as caught:
            verify(directory)
    message = str(caught.value)
    for mention in damage.mentions:
        assert mention in message
    if damage.needs_values:
        assert ".safetensors" in message
