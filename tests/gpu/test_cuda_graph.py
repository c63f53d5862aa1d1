"""A decode pass in a CUDA graph: replays with changing contents give the bits of eager passes, and launch our kernels,
products and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_sgl.captured import CapturedDecode
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from tests.support import native

pytestmark = pytest.mark.gpu

STARTS = (3, 126, 255, 517)
STEPS = 9


@pytest.fixture(scope="module", params=native.runs(), ids=str)
def target_and_mode(request: pytest.FixtureRequest) -> native.Run:
    return request.param


@pytest.fixture(scope="module")
def target(target_and_mode: native.Run) -> str:
    return target_and_mode.target


@pytest.fixture(scope="module")
def model(target_and_mode: native.Run, tmp_path_factory: pytest.TempPathFactory) -> Standalone:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=11)
    target, mode = target_and_mode
    return Standalone(path, target=target, mode=mode, device="cuda", requests=len(STARTS), capacity=1024)


def decode_inputs(seed: int) -> list[dict[int, list[int]]]:
    """Tokens of every step; requests change places."""
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(len(STARTS), generator=generator).tolist() for _ in range(STEPS)]
    return [{r: torch.randint(2, 500, (1,), generator=generator).tolist() for r in requests} for requests in order]


def prefill(model: Standalone) -> None:
    model.reset()
    generator = torch.Generator().manual_seed(4)
    model.extend({r: torch.randint(2, 500, (n,), generator=generator).tolist() for r, n in enumerate(STARTS)})


def test_replays_give_the_bits_of_eager_passes(model: Standalone):
    prefill(model)
    eager = [model.extend(tokens) for tokens in decode_inputs(0)]
    # Captured on another state of the caches: a replay may depend on nothing but its buffers and theirs. The capture
    # runs request 0 at position 0, so what stands there is written again.
    captured = CapturedDecode(model, len(STARTS))
    prefill(model)
    for step, tokens in enumerate(decode_inputs(0)):
        for request, logits in captured(tokens).items():
            assert torch.equal(logits, eager[step][request]), f"step {step}, request {request}"


class Recorder(TorchDispatchMode):
    """Names of the aten operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        creates = "empty" in function.__name__
        if not creates and not function.is_view:
            self.names.add(str(function))
        return result


LIBRARY_PRODUCTS = {"aten.mm.out", "aten.mm.dtype_out"}
EXPERT_PRODUCTS = {
    "sm_90a": {"nvfp4_sgl.w4a16_experts.default"},
    "sm_100a": {"nvfp4_sgl.expert_gate_up.default", "nvfp4_sgl.expert_down.default"},
}
PRODUCTS = {
    "sm_90a": LIBRARY_PRODUCTS | {"nvfp4_sgl.w4a16_product.default"},
    "sm_100a": LIBRARY_PRODUCTS | {"nvfp4_sgl.product.default", "nvfp4_sgl.grouped_product.default"},
}
"""Beside those of the experts. The LM head and, of many tokens, router and index weights are the library's."""


@pytest.mark.parametrize("decode", [True, False])
def test_a_pass_computes_by_our_kernels_and_products_alone(decode: bool, target: str, model: Standalone):
    prefill(model)
    work = model.begin(dict.fromkeys(range(len(STARTS)), [7] * (1 if decode else 5)))
    with Recorder() as recorder:
        model.planner.fill(work.step, work.request)
        model.forward(work)
    known = PRODUCTS[target] | EXPERT_PRODUCTS[target]
    assert recorder.names <= known, recorder.names - known
    assert recorder.names >= EXPERT_PRODUCTS[target]
