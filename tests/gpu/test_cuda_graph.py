"""A decode pass in a CUDA graph: replays with changing contents give the bits of eager passes, and launch our kernels,
products and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_sgl.checkpoint.tiny import write_tiny
from nvfp4_sgl.gpu.products import multiply
from nvfp4_sgl.gpu.standalone import GpuStandalone
from nvfp4_sgl.gpu.step import Step

pytestmark = pytest.mark.gpu

STARTS = (3, 126, 255, 517)
STEPS = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GpuStandalone:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=11)
    return GpuStandalone(path, requests=len(STARTS), capacity=1024)


class CapturedDecode:
    """One token of each of ``count`` requests, captured; the runner's buffers are this object's."""

    def __init__(self, model: GpuStandalone, count: int, full_to_swa: torch.Tensor):
        self.model = model
        self.ids, self.positions, self.requests = torch.zeros(3, count, dtype=torch.int64, device="cuda").unbind()
        self.lengths = torch.ones(count, dtype=torch.int64, device="cuda")
        step = Step.allocate(
            model.config,
            model.decoder.scratch,
            self.positions,
            self.requests,
            model.slots,
            full_to_swa.cuda(),
            longest=model.caches.capacity,
            decode=True,
        )

        def forward() -> torch.Tensor:
            step.prepare(model.decoder.frequencies, self.lengths, None)
            hidden = model.decoder(model.decoder.embed(self.ids, model._embed), self.ids, step, model.caches.layers)
            return multiply(hidden, model._head, torch.float32)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            forward()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), torch.no_grad():
            self.logits = forward()

    def __call__(self, tokens: Mapping[int, list[int]]) -> dict[int, torch.Tensor]:
        batch = self.model.caches.advance(dict.fromkeys(tokens, 1))
        self.ids.copy_(torch.tensor([ids[0] for ids in tokens.values()]))
        self.positions.copy_(batch.starts)
        self.requests.copy_(batch.requests)
        self.lengths.copy_(batch.ends)
        self.graph.replay()
        return dict(zip(tokens, self.logits.clone().split(1), strict=True))


def decode_inputs(seed: int) -> list[dict[int, list[int]]]:
    """Tokens of every step; requests change places."""
    generator = torch.Generator().manual_seed(seed)
    order = [torch.randperm(len(STARTS), generator=generator).tolist() for _ in range(STEPS)]
    return [{r: torch.randint(2, 500, (1,), generator=generator).tolist() for r in requests} for requests in order]


def prefill(model: GpuStandalone) -> None:
    model.reset()
    generator = torch.Generator().manual_seed(4)
    model.extend({r: torch.randint(2, 500, (n,), generator=generator).tolist() for r, n in enumerate(STARTS)})


def test_replays_give_the_bits_of_eager_passes(model: GpuStandalone):
    prefill(model)
    eager = [model.extend(tokens) for tokens in decode_inputs(0)]
    # Captured on another state of the caches: a replay may depend on nothing but its buffers and theirs. The capture
    # runs request 0 at position 0, so what stands there is written again.
    captured = CapturedDecode(model, len(STARTS), model.caches.advance({0: 0}).full_to_swa)
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


PRODUCTS = {"aten.mm.out", "aten.mm.dtype_out", "aten.bmm.out", "aten._grouped_mm.default"}


@pytest.mark.parametrize("decode", [True, False])
def test_a_pass_computes_by_our_kernels_and_products_alone(decode: bool, model: GpuStandalone):
    prefill(model)
    batch = model.caches.advance(dict.fromkeys(range(len(STARTS)), 1 if decode else 5))
    added = batch.ends - batch.starts
    spans = zip(batch.starts.tolist(), batch.ends.tolist(), strict=True)
    positions = torch.cat([torch.arange(start, end) for start, end in spans]).cuda()
    ids = torch.full_like(positions, 7)
    tensors = batch.requests.cuda(), model.slots, batch.full_to_swa.cuda()
    ends, new = batch.ends.cuda(), None if decode else added.cuda()
    with Recorder() as recorder, torch.no_grad():
        step = Step.allocate(model.config, model.decoder.scratch, positions, *tensors, longest=1024, decode=decode)
        step.prepare(model.decoder.frequencies, ends, new)
        model.decoder(model.decoder.embed(ids, model._embed), ids, step, model.caches.layers)
    assert recorder.names <= PRODUCTS, recorder.names - PRODUCTS
    assert "aten._grouped_mm.default" in recorder.names
