"""``nvfp4-sgl layertest``: every boundary of one layer beside the reference; mistakes are found where they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.cli import main
from nvfp4_sgl.model.contract import Activation, Columns
from nvfp4_sgl.ops.linear import ActivationMode
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.reference import attention, experts, projections, sites
from nvfp4_sgl.tracing.bounds import BOUNDS
from nvfp4_sgl.tracing.layer import Stage, compare_layer
from nvfp4_sgl.tracing.layer_cli import first_departure

SWA, CSA, HCA = range(3)
STAGES = {
    "hc_attn.x",
    *(f"attn.{name}" for name in ("project_x.q_lora", "project_x.kv", "prepare.q_lora", "attend", "wo_a", "wo_b")),
    *("hc_ffn.streams", "hc_ffn.x", "ffn.route", "ffn.experts", "hc_ffn.left"),
}
"""Names that every layer has."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=3, num_hidden_layers=3)
    return path


def departure(checkpoint: Path, layer: int, **options: Any) -> Stage | None:
    return first_departure(list(compare_layer(checkpoint, layer, "cpu", **options)), BOUNDS[ActivationMode.W4A16])


@pytest.mark.parametrize(("layer", "more"), [(SWA, set()), (CSA, {"attn.select"}), (HCA, set())])
def test_every_boundary_is_seen_and_right(layer: int, more: set[str], checkpoint: Path) -> None:
    stages = list(compare_layer(checkpoint, layer, "cpu", prompt=150))
    for number in range(3):
        names = [stage.name.removeprefix(f"layers.{layer}.") for stage in stages if stage.number == number]
        assert len(names) == len(set(names)) and STAGES | more <= set(names)
        assert names[0] == "hc_attn.x" and names[-1] == "hc_ffn.left"
    assert first_departure(stages, BOUNDS[ActivationMode.W4A16]) is None
    # Both sides ran: one in bf16, which rounds.
    assert all(stage.median > 0 for stage in stages if not stage.name.endswith("select"))


def in_bf16(change: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A mistake on the side whose activations are bf16, which is the one compared."""

    def plant(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(module: Any, x: Any, *arguments: Any, **options: Any) -> Any:
            output = right(module, x, *arguments, **options)
            values = x.q_lora if isinstance(x, Columns) else x.values if isinstance(x, Activation) else x
            tensors = [values, *(given for given in arguments if isinstance(given, Tensor))]
            dtypes = {getattr(module, "_dtype", None), *(tensor.dtype for tensor in tensors)}
            return change(output) if torch.bfloat16 in dtypes else output

        return wrong

    return plant


def with_nan(output: Activation) -> Activation:
    values = output.require_values().clone()
    values.view(-1)[7] = torch.nan
    return Activation(values)


MISTAKES: list[tuple[type, str, Callable[[Any], Any], int, str]] = [
    (sites.ReferenceSite, "enter", lambda out: (Activation(out[0].values.roll(1, 0)), out[1]), SWA, "hc_attn.x"),
    (attention.ReferenceAttentionCore, "forward", lambda out: Activation(-out.values), HCA, "attn.attend"),
    (projections.ReferenceGroupedProjection, "forward", with_nan, SWA, "attn.wo_a"),
    (attention.ReferenceSelection, "forward", lambda slots: slots.masked_fill(slots % 3 == 0, -1), CSA, "attn.select"),
    (experts.ReferenceRouter, "forward", lambda c: experts.Choices(c.experts.flip(0), c.weights), CSA, "ffn.route"),
    (experts.ReferenceExperts, "forward", lambda out: out * 1.1, HCA, "ffn.experts"),
    (sites.ReferenceSite, "leave", lambda streams: streams * 1.1, SWA, "hc_ffn.streams"),
]


@pytest.mark.parametrize(
    ("module", "method", "change", "layer", "stage"), MISTAKES, ids=[f"{m[-1]}-{m[1]}" for m in MISTAKES]
)
def test_a_mistake_is_named(
    module: type,
    method: str,
    change: Callable[[Any], Any],
    layer: int,
    stage: str,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, method, in_bf16(change)(getattr(module, method)))
    found = departure(checkpoint, layer, prompt=150, steps=0)
    assert found is not None and found.name == f"layers.{layer}.{stage}"


def test_the_command(checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["layertest", str(checkpoint), "--layer", "1", "--prompt", "20", "--steps", "1"]
    assert main(options) == 0
    output = capsys.readouterr().out
    assert "layer 1 (CSA) on cpu, w4a16" in output and "no boundary departs" in output and "attn.wo_b" in output
    assert max(map(len, output.splitlines())) <= 100

    right = experts.ReferenceExperts.forward

    def wrong(module: Any, x: Activation, *arguments: Any) -> Tensor:
        return right(module, x, *arguments) * (1.5 if x.require_values().dtype == torch.bfloat16 else 1)

    monkeypatch.setattr(experts.ReferenceExperts, "forward", wrong)
    assert main([*options, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["departs"]["name"] == "layers.1.ffn.experts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", "3"], "--layer 3: .* has layers 0 to 2"),
        (["--layer", "0", "--target", "sm_90a"], "--target sm_90a: expected a GPU of that kind here, found cpu"),
        (["--layer", "0", "--prompt", "0"], "--prompt 0 --steps 2: expected at least 1 token"),
    ],
)
def test_refusals(options: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layertest", str(checkpoint), *options]) == 2
    assert re.search(message, capsys.readouterr().err)
