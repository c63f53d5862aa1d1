"""Which differences of two checkpoints keep the weights of one from taking the place of the other's."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.checkpoint.interchange import UNUSED, differences
from nvfp4_sgl.checkpoint.verified import Verified, verify
from nvfp4_sgl.config import LayerKind, ModelConfig
from tests.support.damage import change_json, change_tensor, copy_checkpoint


@pytest.fixture(scope="module")
def served(tiny: dict[str, Path]) -> Verified:
    return verify(tiny["nvfp4-full"])


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, tuple):
        return (LayerKind.HCA if value[0] is not LayerKind.HCA else LayerKind.SWA, *value[1:])
    return replace(value, factor=value.factor + 1) if hasattr(value, "factor") else value + 1


@pytest.mark.parametrize("field", [field.name for field in fields(ModelConfig)])
def test_every_field_of_the_model_counts(field: str, served: Verified) -> None:
    config = replace(served.config, **{field: changed(getattr(served.config, field))})
    found = differences(served, replace(served, config=config))
    name = {"layer_kinds": "compress_ratios", "yarn": "rope_scaling"}.get(field, field)
    assert found == [] if field in UNUSED else len(found) == 1 and f"'{name}'" in found[0]


def test_fields_that_the_server_has_taken_over(served: Verified) -> None:
    found = replace(
        served, raw=served.raw | {"eos_token_id": 77, "activation_mode": "w4a4", "transformers_version": "9"}
    )
    lines = differences(served, found)
    assert len(lines) == 2 and "'activation_mode': served None, found 'w4a4'" in lines[0] and "eos_token_id" in lines[1]
    assert len(differences(served, found, overridden=["activation_mode"])) == 1


def test_storages_of_matrices_count(served: Verified, tiny: dict[str, Path]) -> None:
    other = verify(tiny["deepseek"])
    lines = differences(served, replace(other, config=served.config, raw=served.raw))
    matrices = len(served.summary.storages)
    assert 0 < len(lines) <= matrices and all(line.startswith("matrix '") for line in lines)


def test_dtypes_of_other_tensors_count(served: Verified, tiny: dict[str, Path], tmp_path: Path) -> None:
    """A norm in fp32, as some exporters write it: it loads, but not into the bf16 one that is there."""
    path = copy_checkpoint(tiny["nvfp4-full"], tmp_path / "copy")
    change_tensor(path, "norm.weight", lambda dtype, shape, data: ("F32", shape, bytes(2 * len(data))))
    (line,) = differences(served, verify(path))
    assert "tensor 'norm.weight'" in line and "BF16 [256]" in line and "F32 [256]" in line


def test_values_do_not(served: Verified, tiny: dict[str, Path], tmp_path: Path) -> None:
    path = copy_checkpoint(tiny["nvfp4-full"], tmp_path / "copy")
    change_tensor(path, "norm.weight", lambda dtype, shape, data: (dtype, shape, bytes(len(data))))
    change_json(path / "config.json", lambda config: config.update(transformers_version="0"))
    assert differences(served, verify(path)) == []
