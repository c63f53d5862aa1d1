"""``nvfp4-sgl layertest`` on the GPU targets: their containers are read as the reference's, and no boundary departs."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvfp4_sgl.checkpoint.tiny import write_tiny
from nvfp4_sgl.targets.choose import Target
from nvfp4_sgl.tracing.layer import compare_layer
from nvfp4_sgl.tracing.layer_cli import BOUNDS, first_departure
from tests.support import native
from tests.support.interpreted import ON_GPU

CSA = 1
PROMPT = 9
"""Two ratio-4 entries, which the decode step chooses from."""


@pytest.mark.parametrize("target", native.targets(), ids=lambda target: target.value)
def test_no_boundary_departs(target: Target, tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=5, num_hidden_layers=2)
    with native.gemms(target):
        device = "cuda" if ON_GPU else "cpu"
        stages = list(compare_layer(tmp_path / "tiny", CSA, target, device=device, prompt=PROMPT, steps=1))
    names = {stage.name.removeprefix(f"layers.{CSA}.") for stage in stages if stage.number == 1}
    assert {"hc_attn.x", "attn.prepare.q_lora", "attn.select", "attn.wo_a", "attn.wo_b", "ffn.route"} <= names
    assert first_departure(stages, BOUNDS[native.MODES[target]]) is None, stages
    # Nothing that was compared is empty, and no side with itself.
    assert all(stage.amax > 0 and stage.reference_amax > 0 for stage in stages)
    assert all(stage.median > 0 for stage in stages if "select" not in stage.name)
