"""Mode ``w4a4`` on Hopper computes what SM100 computes, sublayer by sublayer, and mistakes planted in it are seen.

Both targets share every kernel but those around GEMMs, and their GEMMs are computed in torch here, so what they give
differs by the order of fp32 factors alone: by a bf16 that rounds to the other side now and then, and by what follows
from it. ``test_sublayers`` and ``test_decoder`` hold both against the CPU reference, on a Hopper GPU this one alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support import native
from tests.support.interpreted import ON_GPU
from tests.support.lockstep import activations, relative_errors
from tests.support.mutation import mutated

pytestmark = pytest.mark.skipif(ON_GPU, reason="a GPU runs one of the two targets")

FORMATS = ("nvfp4-full", "nvfp4-experts", "deepseek")
"""All in NVFP4; routed experts in NVFP4 or MXFP4, others in FP8 and BF16."""
SHAPES: dict[str, Any] = {"num_hidden_layers": 2, "n_routed_experts": 6}
LAYERS = range(2)
"""Window-only, and CSA."""
PASSES = (3, 1)
ATTENTION, EXPERTS = 0.003, 0.003
"""Bounds of a row's relative error. Found: 0 and 0.00006."""
OTHER_MODE = 0.05
"""At least this far is a row of ``w4a16`` from ``w4a4``."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp("tiny") / name for name in FORMATS}
    for name, path in paths.items():
        write_tiny(path, name, seed=5, **SHAPES)
    return paths


def sublayers(path: Path, target: str, mode: str, passes: Sequence[int] = PASSES) -> list[tuple[Tensor, Tensor]]:
    """What attention and experts of each layer give in a prompt and a decode step, fp32, from equal inputs.

    ``passes`` are how many tokens each of them has. By the package as it is imported right now.
    """
    modes: Any = importlib.import_module("nvfp4_sgl.ops.modes")
    standalone: Any = importlib.import_module("nvfp4_sgl.standalone")
    operands: Any = importlib.import_module("nvfp4_sgl.targets.fused.activations")
    found = []
    with native.gemms(target), torch.no_grad():
        made: dict[str, Any] = {"target": target, "mode": modes.ActivationMode(mode)}
        model = standalone.Standalone(path, requests=1, capacity=256, **made)
        for number, tokens in enumerate(passes):
            work = model.begin({0: list(range(7, 7 + tokens))})
            for layer in LAYERS:
                block, cache = model.decoder.layers[layer], model.caches.layers[layer]
                x, y = (activations(tokens, model.config.hidden_size, 10 * number + 2 * layer + n) for n in range(2))
                attended = block.attn(operands.in_form(x, block.attn.takes), work.step, cache)
                mixed = block.ffn(operands.in_form(y, block.ffn.takes), work.ids, work.step)
                found.append((attended.float(), mixed.float()))
    return found


@pytest.fixture(scope="module")
def on_sm100(checkpoints: dict[str, Path]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """By format; computed once, before anything is planted."""
    return {name: sublayers(path, "sm_100a", "w4a4") for name, path in checkpoints.items()}


def worst(found: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """The largest relative error of a row, of attention and of the experts; infinite where one is no number."""
    errors = [
        [float(relative_errors(ours, theirs).max().nan_to_num(torch.inf)) for ours, theirs in zip(*pair, strict=True)]
        for pair in zip(found, expected, strict=True)
    ]
    attention, experts = (max(column) for column in zip(*errors, strict=True))
    return attention, experts


@pytest.mark.parametrize("name", FORMATS)
def test_hopper_computes_what_sm100_does(name: str, checkpoints: dict[str, Path], on_sm100: Any) -> None:
    attention, experts = worst(sublayers(checkpoints[name], "sm_90a", "w4a4"), on_sm100[name])
    print(f"{name}: worst rows differ by {attention:.5f} in attention, {experts:.5f} in the experts")
    assert attention < ATTENTION and experts < EXPERTS


@pytest.mark.parametrize("name", FORMATS)
def test_w4a16_is_something_else(name: str, checkpoints: dict[str, Path], on_sm100: Any) -> None:
    attention, experts = worst(sublayers(checkpoints[name], "sm_90a", "w4a16"), on_sm100[name])
    print(f"{name}: worst rows differ by {attention:.4f} in attention, {experts:.4f} in the experts")
    assert experts > OTHER_MODE and (attention > OTHER_MODE or name != "nvfp4-full")


MISTAKES = {
    "row scales of other rows": ("round_to_nvfp4(values, out, scale), scale", "{old}.roll(1, 0)"),
    "alphas forgotten": (".copy_(gate_up.global_scale)", ".fill_(1)"),
    "alphas of gate and up exchanged": ("gate_up.global_scale)", "gate_up.global_scale.flip(1))"),
    "no constant row scale behind SwiGLU": ("down.global_scale * self._hidden_scale", "down.global_scale"),
    "no row scale after the GEMM": ("scale_rows(sums, scale,", "scale_rows(sums, torch.ones_like(scale),"),
    "row scales of other groups": (
        "torch.float32, features), scale, dtype",
        "torch.float32, features), scale.roll(1, 1) if scale.dim() == 2 else scale, dtype",
    ),
    "experts read what is not rounded": ("scatter_rows(values, routes", "scatter_rows(x, routes"),
}
"""What stands there, and what is put in its place."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(mistake: str, checkpoints: dict[str, Path], on_sm100: Any) -> None:
    old, new = MISTAKES[mistake]
    new = new.format(old=old)
    expected = on_sm100["nvfp4-full"][: len(LAYERS)]  # of the prompt, where all of them show
    with mutated("targets.fused.gemm_rounded", old, new):
        attention, experts = worst(sublayers(checkpoints["nvfp4-full"], "sm_90a", "w4a4", PASSES[:1]), expected)
    print(f"{mistake}: {attention:.3f} in attention, {experts:.3f} in the experts")
    assert attention > ATTENTION or experts > EXPERTS


MXFP8_MISTAKES = {
    "FP8 matrices see activations as they are": (
        "gemm_rounded",
        "return round_to_mxfp8(values, values.new_empty(values.shape))",
        "return values",
    ),
    "the shared expert sees activations as they are": (
        "gemm_rounded",
        "SwiGluGemm(self.load(",
        "SwiGluGemm(self.backend.load(",
    ),
    "what SwiGLU gives is not rounded": (
        "experts",
        "backend.load(context, [matrices.down])",
        "backend.backend.load(context, [matrices.down])",
    ),
}


@pytest.mark.parametrize("mistake", MXFP8_MISTAKES)
def test_mistakes_with_fp8_are_seen(mistake: str, checkpoints: dict[str, Path], on_sm100: Any) -> None:
    module, old, new = MXFP8_MISTAKES[mistake]
    with mutated(f"targets.fused.{module}", old, new):
        ours = sublayers(checkpoints["nvfp4-experts"], "sm_90a", "w4a4", PASSES[:1])
    found = worst(ours, on_sm100["nvfp4-experts"][: len(LAYERS)])
    print(f"{mistake}: {found[0]:.4f} in attention, {found[1]:.4f} in the experts")
    assert found[0] > ATTENTION or found[1] > EXPERTS
