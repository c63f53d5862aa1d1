"""``nvfp4-sgl layertest`` on the GPU targets: their containers are read as the reference's, and no boundary departs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.tracing.bounds import BOUNDS
from nvfp4_sgl.tracing.diff import differences
from nvfp4_sgl.tracing.layer import compare_layer
from nvfp4_sgl.tracing.layer_cli import first_departure
from nvfp4_sgl.tracing.reading import read_record
from nvfp4_sgl.tracing.record import Recorder
from tests.support import native
from tests.support.interpreted import ON_GPU

CSA = 1
TOKENS = 6
PROMPT = 9
"""Two ratio-4 entries, which the decode step chooses from."""


@pytest.mark.parametrize("run", native.runs(), ids=str)
def test_no_boundary_departs(run: native.Run, tmp_path: Path) -> None:
    target, mode = run
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=5, num_hidden_layers=2)
    with native.gemms(target):
        device = "cuda" if ON_GPU else "cpu"
        settings: dict[str, Any] = {"device": device, "mode": mode, "prompt": PROMPT, "steps": 1}
        stages = list(compare_layer(tmp_path / "tiny", CSA, target, **settings))
    names = {stage.name.removeprefix(f"layers.{CSA}.") for stage in stages if stage.number == 1}
    assert {"hc_attn.x", "attn.prepare.q_lora", "attn.select", "attn.wo_a", "attn.wo_b", "ffn.route"} <= names
    assert first_departure(stages, BOUNDS[mode]) is None, stages
    # Nothing that was compared is empty, and no side with itself.
    assert all(stage.amax > 0 and stage.reference_amax > 0 for stage in stages)
    assert all(stage.median > 0 for stage in stages if "select" not in stage.name)


def test_records_of_a_gpu_and_of_the_reference_are_compared(tmp_path: Path) -> None:
    target = native.targets()[0]
    write_tiny(tmp_path / "tiny", "nvfp4-full", seed=5, num_hidden_layers=2)
    files = []
    for name, of, device in (("cpu", "cpu", "cpu"), ("gpu", target, "cuda" if ON_GPU else "cpu")):
        with native.gemms(of) if of != "cpu" else nullcontext():
            model = Standalone(tmp_path / "tiny", target=of, device=device, packed=True, requests=1, capacity=64)
            recorder = Recorder(model.decoder, tmp_path / name, 1, {"mode": "w4a16", "rank": 0, "ranks": 1})
            work = model.begin({0: list(range(7, 7 + TOKENS))})
            with recorder.recording(work.ids, work.request.positions):
                model.forward(work)
        files.append(tmp_path / name)
    found = list(differences(*map(read_record, files)))
    assert max(each.error for each in found) < 0.2
    assert len(found) > 30 and not all(each.equal for each in found)
