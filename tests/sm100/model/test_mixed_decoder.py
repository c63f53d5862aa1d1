"""Released checkpoints as SM100 runs them: routed experts in NVFP4, FP8 matrices as MXFP8, compressors in bf16.

ModelOpt's experts-only releases store NVFP4; DeepSeek's own store MXFP4, which is read as NVFP4.

Triton is interpreted and every GEMM of ours emulated; ``test_decoder.py`` says how such a run is judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.cutedsl_kernels.warm_up import keys_for
from nvfp4_sgl.ops.linear import ActivationMode
from nvfp4_sgl.standalone import Standalone
from tests.sm100.model.test_decoder import SHAPES, SUMS, Gemms, log_probabilities
from tests.sm100.support.launcher import emulated_operations
from tests.support.calm import write_calm
from tests.support.full import full
from tests.support.reference_gemms import reference_gemms

PASSES: tuple[Mapping[int, list[int]], ...] = ({0: [5, 61, 7, 300, 22], 1: [401, 9]},)
"""Token ids by request: two prompts, one of which closes a ratio-4 window. Decode steps: ``test_sublayers.py``."""
LIKE_THE_REFERENCE = 1.4
"""Bound of the distance from activations that are not quantised, as a multiple of the reference's."""


@pytest.fixture(scope="module", params=["nvfp4-experts", "deepseek"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calm(tmp_path_factory.mktemp(request.param), seed=11, format=request.param, **SHAPES)


def run(checkpoint: Path, gemms: Gemms) -> tuple[Tensor, Any]:
    """Log-probabilities of SM100's decoder, and the launcher that ran its GEMMs; the planner knows all of them."""
    with gemms() as runner:
        model = Standalone(checkpoint, target="sm_100a", requests=2, capacity=256)
        assert set(model.config.layer_kinds) == set(LayerKind)
        found = log_probabilities(model, PASSES)
        tokens, limit = max(sum(map(len, chunks.values())) for chunks in PASSES), model.config.swiglu_limit
        ready = keys_for(model.planner.gemm_specs(), tokens, limit, "sm_100a", runner.clusters(model.device))
    assert set(runner.keys) <= set(ready)
    return found, runner


@pytest.fixture(scope="module")
def computed(checkpoint: Path) -> Tensor:
    return run(checkpoint, reference_gemms)[0]


@pytest.mark.parametrize("checkpoint", ["nvfp4-experts", *full("deepseek")], indirect=True)
def test_emulated_gemms_give_what_torch_gives(checkpoint: Path, computed: Tensor) -> None:
    emulated, runner = run(checkpoint, emulated_operations)
    assert bool(torch.isfinite(emulated).all())
    # MXFP8: from x, from q, o_a, o_b, and two of the shared expert. NVFP4: gate and up, down of the routed ones.
    kinds = [key.shape.operands for key in runner.keys]
    times = SHAPES["num_hidden_layers"] * len(PASSES)
    assert (kinds.count("mxfp8"), kinds.count("nvfp4")) == (6 * times, 2 * times)
    assert float((emulated - computed).abs().max()) <= SUMS


def test_as_good_as_the_reference(checkpoint: Path, computed: Tensor) -> None:
    """Root mean square distances from activations that are not quantised, of each position."""

    def reference(mode: ActivationMode, dtype: torch.dtype) -> Tensor:
        model = Standalone(checkpoint, packed=True, mode=mode, dtype=dtype, requests=2, capacity=256)
        return log_probabilities(model, PASSES)

    exact = reference(ActivationMode.W4A16, torch.float32)
    cost = [reference(ActivationMode.W4A4, dtype) for dtype in (torch.bfloat16, torch.float32)]
    ours, *theirs = ((found - exact).square().mean(-1).sqrt().median() for found in (computed, *cost))
    print(f"median distance from w4a16: SM100 {ours:.3f}, the reference in w4a4 {theirs[0]:.3f} and {theirs[1]:.3f}")
    assert 0 < ours <= LIKE_THE_REFERENCE * max(theirs)
