"""Layers of Pro's true width served by two and by four GPUs, beside one: NCCL, SGLang's all-reduce, CUDA graphs.

Two GPUs have run it, four have not. ``tests/serving/test_dummy_ranks.py`` runs the same on CPU servers, in small.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import dummy_ranks
from tests.support.dummy_ranks import Place
from tests.support.gpu_server import FLAGS
from tests.support.gpus import FOUR_GPUS, TWO_GPUS, one_gpu
from tests.support.released import PRO, config_json
from tests.support.server import Server

pytestmark = [pytest.mark.gpu, pytest.mark.server, pytest.mark.timeout(470)]

LAYERS, EXPERTS = 4, 32
"""Layers of every kind that Pro has; experts that one GPU holds beside two other servers."""


@pytest.fixture(scope="module", params=[pytest.param(2, marks=TWO_GPUS), pytest.param(4, marks=FOUR_GPUS)])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    ratios = [*PRO["compress_ratios"][:LAYERS], 0]
    fields = config_json(PRO, num_hidden_layers=LAYERS, compress_ratios=ratios, n_routed_experts=EXPERTS)
    model = dummy_ranks.write_config(tmp_path_factory.mktemp("pro"), fields)
    flags = (*FLAGS, "--mem-fraction-static", "0.25")
    place = Place(flags, request.param, one={"CUDA_VISIBLE_DEVICES": one_gpu()})
    with dummy_ranks.servers(place, model, tmp_path_factory.mktemp("logs")) as found:
        yield found


def test_ranks_agree_with_one(servers: dict[str, Server]) -> None:
    dummy_ranks.check(servers)
