"""Simulated uniform routing on a GPU's boundaries is the reference's: same experts, same weights, same permutation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.model.policy import Choice
from nvfp4_sgl.synthetic.random_weights import verify_dummy
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config
from nvfp4_sgl.targets import reference
from nvfp4_sgl.targets.fused.router import FusedRouter
from nvfp4_sgl.targets.reference.experts import ReferenceRouter
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.router_logits import semaphores_size

TOP_K_LAYER = 3


@pytest.mark.parametrize("tokens", [1, 7, 20, 200])
def test_fused_router(tokens: int, tmp_path: Path) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(TinyFormat.NVFP4_FULL, {})))
    dummy = verify_dummy(tmp_path)
    config = dummy.config
    context = Context(
        dummy.reader(device), config, reference.boundaries(), device, torch.bfloat16, uniform_experts=True
    )
    on_cpu = Context(dummy.reader(), config, reference.boundaries(), uniform_experts=True)
    visits = config.num_experts_per_tok + 1
    experts = SimpleNamespace(
        has_shared_group=True,
        new_routes=lambda count: Routes.allocate(count, visits, config.n_routed_experts + 1, 8, device),
    )
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    ids = torch.zeros(tokens, dtype=torch.int64)
    window_write = torch.full((tokens,), 256, dtype=torch.int32, device=device)
    step = SimpleNamespace(
        small_gemm_semaphores=torch.zeros(semaphores_size(config.n_routed_experts), dtype=torch.int32, device=device),
        planned={Choice.SMALL_GEMM: tokens},
        route_semaphore=torch.zeros(1, dtype=torch.int32, device=device),
        plan=SimpleNamespace(window_write=window_write),
    )
    layer = config.layer(TOP_K_LAYER)
    routes = FusedRouter(context, layer, experts).forward(x.to(device), ids.to(device), step)  # type: ignore[arg-type]
    expected = ReferenceRouter(on_cpu, layer, None).forward(x, ids, None)  # type: ignore[arg-type]
    assert torch.equal(routes.experts[:, :-1].cpu().long(), expected.experts)
    assert torch.allclose(routes.weights[:, :-1].cpu(), expected.weights, rtol=1e-6)
    assert bool((routes.experts[:, -1] == config.n_routed_experts).all())
    counted = torch.bincount(expected.experts.reshape(-1), minlength=config.n_routed_experts)
    assert torch.equal(routes.counts[: config.n_routed_experts].cpu().long(), counted)
