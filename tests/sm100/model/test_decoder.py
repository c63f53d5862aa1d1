"""The whole decoder as SM100 runs it, with no SM100: Triton interpreted, every GEMM's PTX executed in the emulator.

Emulated GEMMs are compared with the same GEMMs computed in torch, around which everything else is equal: nothing but
the order of fp32 sums may differ. That run is then judged against the CPU reference. FP4 activations amplify every
rounding, so two right implementations are as far from each other as from unquantised activations: the yardstick is
what quantising costs the reference itself. ``tests/gpu/test_sublayers.py`` judges each sublayer from equal inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.config import LayerKind, LayerSpec, RopeTable
from nvfp4_sgl.cutedsl_kernels.warm_up import keys_for
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.weights.gemms import distinct_gemms
from tests.sm100.support.launcher import emulated_operations
from tests.support.calm import write_calm
from tests.support.lockstep import Recording, record, relative_errors, replay
from tests.support.long_caches import fill_randomly
from tests.support.ranks import Exchange
from tests.support.reference_gemms import reference_gemms

SHAPES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 6, "index_topk": 512}
"""A layer of each kind, and nothing to choose: a flipped choice would hide mistakes."""

PASSES = ({0: [5, 61, 7, 300, 22], 1: [401, 9]}, {0: [95, 12]}, {0: [77], 1: [8]})
"""Token ids by request: two prompts, a chunk that closes a ratio-4 window, a decode step of both."""

SUMS = 1e-3
"""What another order of fp32 sums may change of a log-probability. Found: 0."""

FAR = 2003
"""A position, with fewer ratio-4 entries than are chosen. Angles of the tables' slower pairs differ by radians."""
FAR_ERROR = 0.2

Gemms = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calm(tmp_path_factory.mktemp("calm"), seed=11, **SHAPES)


def log_probabilities(model: Standalone, passes: Any = PASSES) -> Tensor:
    """Log-probabilities of all tokens of all passes."""
    model.reset()
    return torch.cat([logits for tokens in passes for logits in model.extend(tokens).values()]).log_softmax(-1)


def run(checkpoint: Path, gemms: Gemms) -> tuple[Tensor, Any]:
    """Log-probabilities of SM100's decoder, and the launcher that ran its GEMMs; the warm-up knows all of them."""
    with gemms() as runner:
        model = Standalone(checkpoint, target="sm_100a", requests=2, capacity=256)
        assert set(model.config.layer_kinds) == set(LayerKind)
        found = log_probabilities(model)
    tokens = max(sum(len(chunk) for chunk in chunks.values()) for chunks in PASSES)
    limit, gpu = model.config.swiglu_limit, runner.clusters(model.device)
    ready = keys_for(distinct_gemms(model.config), tokens, limit, "sm_100a", gpu)
    assert set(runner.keys) <= set(ready)
    return found, runner


@pytest.fixture(scope="module")
def computed(checkpoint: Path) -> Tensor:
    return run(checkpoint, reference_gemms)[0]


def test_emulated_gemms_give_what_torch_gives(checkpoint: Path, computed: Tensor):
    emulated, runner = run(checkpoint, emulated_operations)
    assert bool(torch.isfinite(emulated).all())
    # from x, from q, o_a, o_b, gate and up, down: in every layer of every pass.
    assert len(runner.keys) == 6 * SHAPES["num_hidden_layers"] * len(PASSES)
    assert float((emulated - computed).abs().max()) <= SUMS


def test_as_good_as_the_reference(checkpoint: Path, computed: Tensor):
    """Root mean square distances from activations that are not quantised, of each position."""

    def reference(mode: ActivationMode, dtype: torch.dtype) -> Tensor:
        model = Standalone(checkpoint, packed=True, mode=mode, dtype=dtype, requests=2, capacity=256)
        return log_probabilities(model)

    exact = reference(ActivationMode.W4A16, torch.float32)
    cost = [reference(ActivationMode.W4A4, dtype) for dtype in (torch.bfloat16, torch.float32)]
    ours, *theirs = ((found - exact).square().mean(-1).sqrt().median() for found in (computed, *cost))
    print(f"median distance from w4a16: SM100 {ours:.3f}, the reference in w4a4 {theirs[0]:.3f} and {theirs[1]:.3f}")
    assert ours <= 1.4 * max(theirs)


@pytest.fixture(scope="module")
def far(checkpoint: Path) -> Recording:
    """The CPU reference's decode step at a position where RoPE's two tables have nothing in common."""
    cached, passes = {0: FAR}, [{0: [17]}]
    return record(
        checkpoint, mode=ActivationMode.W4A4, cached=cached, passes=passes, capacity=FAR + 1, fill=fill_randomly
    )


def attention_errors(checkpoint: Path, far: Recording) -> list[float]:
    """By layer, the relative error of attention's row at the far position, on the reference's inputs and caches."""
    layers = range(SHAPES["num_hidden_layers"])
    with reference_gemms():
        model = Standalone(checkpoint, target="sm_100a", requests=1, capacity=FAR + 1)
        (row,) = replay(model, far, layers)
    return [float(relative_errors(row[n].attention, far.layers[0][n].attention[1]).max()) for n in layers]


def test_far_positions_are_rotated_by_the_layers_table(
    checkpoint: Path, far: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer with the other table is seen in its own attention: each of the three kinds."""
    right = attention_errors(checkpoint, far)
    others = {table: next(other for other in RopeTable if other is not table) for table in RopeTable}
    table_of = LayerSpec.__dict__["rope"].fget
    monkeypatch.setattr(LayerSpec, "rope", property(lambda layer: others[table_of(layer)]))
    wrong = attention_errors(checkpoint, far)
    print(f"relative errors by layer: {right}, by the other table {wrong}")
    assert max(right) < FAR_ERROR
    assert min(wrong) > 1.3 * FAR_ERROR


def test_two_ranks(checkpoint: Path):
    """Each rank's GEMMs emulated; both ranks get the same, and what torch's GEMMs give them."""
    passes = ({0: [5, 61, 7, 300]},)

    def ranks(gemms: Gemms) -> Tensor:
        exchange = Exchange()
        with gemms():
            models = [
                Standalone(
                    checkpoint,
                    target="sm_100a",
                    requests=1,
                    capacity=256,
                    parallel=parallel,
                )
                for parallel in exchange.ranks
            ]
            first, second = exchange.run(lambda rank: log_probabilities(models[rank], passes))
        assert torch.equal(first, second)
        return first

    computed = ranks(reference_gemms)
    assert bool(torch.isfinite(computed).all())
    assert float((ranks(emulated_operations) - computed).abs().max()) <= SUMS
