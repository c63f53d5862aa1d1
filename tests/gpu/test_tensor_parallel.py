"""Two tensor-parallel ranks of the GPU decoder against one, on a single device (``tests.support.ranks``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.tiny import write_tiny
from nvfp4_sgl.errors import ConfigError
from nvfp4_sgl.model.contract import Operand
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.targets.choose import Target
from nvfp4_sgl.weights.parallel import TensorParallel
from tests.support.interpreted import ON_GPU
from tests.support.ranks import RANKS, Exchange

DEVICE = "cuda" if ON_GPU else "cpu"
LAYERS = range(3)
"""Window-only, CSA and HCA."""

PASSES = ({0: [5, 61, 7]}, {0: [300]})
"""Tokens by request: a prompt, and a decode step that closes a ratio-4 window."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, "nvfp4-full", seed=11, num_hidden_layers=len(LAYERS), n_routed_experts=6)
    return path


def load(checkpoint: Path, parallel: TensorParallel) -> Standalone:
    return Standalone(checkpoint, target=Target.SM90, device=DEVICE, requests=1, capacity=256, parallel=parallel)


@pytest.fixture(scope="module")
def exchange() -> Exchange:
    return Exchange()


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> Standalone:
    return load(checkpoint, TensorParallel())


@pytest.fixture(scope="module")
def ranks(checkpoint: Path, exchange: Exchange) -> list[Standalone]:
    return [load(checkpoint, TensorParallel(rank, len(RANKS), exchange.all_reduce(rank))) for rank in RANKS]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Of the worst row."""
    assert bool(torch.isfinite(found).all())
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("layer", LAYERS)
def test_parts_of_sublayers_add_up(layer: int, whole: Standalone, ranks: list[Standalone]):
    """But for the rounding of each part and their sum to bf16."""
    ids = torch.tensor([5, 61, 7, 300, 12, 95], device=DEVICE)
    x = torch.randn(len(ids), whole.config.hidden_size, generator=torch.Generator().manual_seed(3)).bfloat16()

    def sublayers(model: Standalone) -> tuple[Tensor, Tensor]:
        model.reset()
        work = model.begin({0: ids.tolist()})
        block, given = model.decoder.layers[layer], Operand(x.to(DEVICE))
        attended = block.attn(given, work.step, model.caches.layers[layer])
        return attended.float(), block.ffn(given, ids, work.step).float()

    for expected, *parts in zip(sublayers(whole), *map(sublayers, ranks), strict=True):
        assert relative_error(torch.stack(parts).sum(0), expected) < 0.01


def log_probabilities(model: Standalone) -> Tensor:
    model.reset()
    return torch.cat([model.extend(tokens)[0] for tokens in PASSES]).log_softmax(-1)


def median_distance(found: Tensor, expected: Tensor) -> float:
    """Of the root mean square distances of the positions."""
    return float((found - expected).square().mean(-1).sqrt().median())


def test_log_probabilities(whole: Standalone, ranks: list[Standalone], exchange: Exchange, checkpoint: Path):
    """Each number of ranks may be as far from fp32 activations as rounding to bf16 takes the CPU reference, so twice
    that from the other."""
    rounded, exact = (
        log_probabilities(Standalone(checkpoint, packed=True, dtype=dtype, requests=1, capacity=256))
        for dtype in (torch.bfloat16, torch.float32)
    )
    found = exchange.run(lambda rank: log_probabilities(ranks[rank]))
    assert torch.equal(*found)
    collectives = 2 * len(LAYERS) * len(PASSES)
    assert [len(given) for given in exchange.given] == [collectives] * len(RANKS)
    distance, yardstick = median_distance(found[0], log_probabilities(whole)), median_distance(rounded, exact)
    print("median distance of two ranks from one, of bf16 from fp32:", distance, yardstick)
    assert distance <= 2 * yardstick


def test_a_model_that_cannot_be_split_is_refused(checkpoint: Path):
    with pytest.raises(ConfigError, match="o_groups is 2, expected a multiple of 4"):
        load(checkpoint, TensorParallel(0, 4))
