"""Ranks that hold whole experts instead of a part of each: an ownership like that of expert parallelism, as a toy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.memory.weights import EXPERTS, MATRICES, weight_bytes
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.targets.fused.backends import SM100
from nvfp4_sgl.targets.fused.experts import Experts
from nvfp4_sgl.targets.target import CPU
from nvfp4_sgl.weights.gemms import launched_gemms
from nvfp4_sgl.weights.layout import expert_matrices
from nvfp4_sgl.weights.parallel import ExpertShare, Ownership, TensorParallel
from tests.support.ranks import Exchange

RANKS, LAYERS = 2, 3


def blocks(owner: Ownership, config: ModelConfig) -> ExpertShare:
    """A block of whole routed experts, on rank 1 from the last to the first; of the shared expert a part, as always."""
    held = [*owner.share(config.n_routed_experts)]
    return ExpertShare(
        tuple(held[:: -1 if owner.rank else 1]),
        range(config.moe_intermediate_size),
        owner.share(config.moe_intermediate_size),
    )


def strided(owner: Ownership, config: ModelConfig) -> ExpertShare:
    """Every second whole expert, and the shared one on rank 0 and 1 in unlike parts."""
    inner = config.moe_intermediate_size
    cut = inner // 4
    return ExpertShare(
        tuple(range(owner.rank, config.n_routed_experts, owner.size)),
        range(inner),
        range(cut, inner) if owner.rank else range(cut),
    )


class Whole(TensorParallel):
    """A rank that holds whole experts."""

    rule: Callable[[Ownership, ModelConfig], ExpertShare]

    def experts(self, config: ModelConfig) -> ExpertShare:
        return type(self).rule(self, config)


@pytest.fixture(params=[blocks, strided])
def kind(request: pytest.FixtureRequest) -> type[Whole]:
    return type("Toy", (Whole,), {"rule": staticmethod(request.param)})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    shapes: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "o_groups": RANKS}
    write_tiny(path, "nvfp4-full", seed=11, moe_intermediate_size=128, **shapes)
    return path


@torch.no_grad()
def test_ranks_of_whole_experts_together_compute_what_one_rank_does(kind: type[Whole], checkpoint: Path) -> None:
    """But for fp32 rounding: the sum over ranks has the same terms in another order."""
    passes = [torch.randint(3, 400, (count,)).tolist() for count in (19, 5, 1)]
    alone = Standalone(checkpoint, requests=1, capacity=256)
    expected = torch.cat([alone.extend({0: ids})[0] for ids in passes]).log_softmax(-1)
    exchange = Exchange(RANKS)
    held = [kind(each.rank, each.size, each.all_reduce, each.sequence) for each in exchange.ranks]
    models = [Standalone(checkpoint, requests=1, capacity=256, parallel=each) for each in held]
    logits = exchange.run(lambda rank: torch.cat([models[rank].extend({0: ids})[0] for ids in passes]))
    for each in logits:
        assert float((each.log_softmax(-1) - expected).abs().max()) < 1e-4


def test_gemms_and_forecast_follow_what_a_rank_holds(kind: type[Whole], checkpoint: Path) -> None:
    verified = verify(checkpoint)
    config, storage = verified.config, verified.inventory.storage
    held = [kind(rank, RANKS) for rank in range(RANKS)]
    for owner in held:
        share = owner.experts(config)
        stems = [[shard.stem for shard in each.shards] for each in expert_matrices(config, config.layer(0), owner)]
        assert [stem[0].split(".")[4] for stem in stems[:-1]] == [str(index) for index in share.routed]
        gemms = {gemm.name: gemm for gemm in launched_gemms(config, owner) if ".0.ffn" in gemm.shards[0].stem}
        routed, shared = gemms["experts.w1 + w3"], gemms["shared_experts.w2"]
        assert (routed.groups, routed.features, routed.shared) == (len(share.routed), len(share.inner), False)
        assert (shared.k, shared.features) == (len(share.shared), config.hidden_size)
    whole = weight_bytes(config, storage, "cpu", Ownership(), 4)
    parts = [weight_bytes(config, storage, "cpu", owner, 4) for owner in held]
    even = [weight_bytes(config, storage, "cpu", Ownership(rank, RANKS), 4) for rank in range(RANKS)]
    assert [part[MATRICES] for part in parts] == [part[MATRICES] for part in even]
    # Each rank keeps a global scale for each row of its down matrices: those of the shared expert are on both.
    scales = 4 * LAYERS * config.hidden_size * (RANKS - 1)
    assert sum(part[EXPERTS] for part in parts) == whole[EXPERTS] + scales


def test_a_gpu_refuses_experts_that_its_router_does_not_sort(checkpoint: Path) -> None:
    verified = verify(checkpoint)
    config, boundaries = verified.config, choose(CPU.word, None).boundaries
    owner = type("Toy", (Whole,), {"rule": staticmethod(blocks)})(0, RANKS)
    context = Context(verified.reader(torch.device("cpu")), config, boundaries, parallel=owner)
    with pytest.raises(UnsupportedError, match=r"routed experts \(0, 1.*expected every expert in order"):
        Experts(SM100, context, expert_matrices(config, config.layer(0), owner))
