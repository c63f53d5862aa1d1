"""Forecasts of eight GPUs against bytes counted by config.json's numbers alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.memory.forecast import Forecast, forecast
from nvfp4_sgl.memory.setting import Setting
from nvfp4_sgl.memory.weights import EXPERTS, MATRICES, OTHERS, VOCABULARY
from tests.support.released import FLASH, PRO

GB = 10**9
H200, H100 = 139 << 30, 78 << 30
"""Bytes that are free on a card of 141 GB and of 80 GB."""
MODELS = {"flash": FLASH, "pro": PRO}


class AllNvfp4(Inventory):
    def storage(self, name: str) -> Storage:
        return Storage.NVFP4


@functools.cache
def of_rank(model: str, ranks: int, requests: int = 256) -> Forecast:
    config = ModelConfig.from_dict(MODELS[model])
    verified: Any = type("V", (), {"config": config, "inventory": AllNvfp4(Path(), {})})
    return forecast(verified, "sm_90a", Setting(ranks, requests, 16384, 8192, 2, None, 0.1, 0.85), None)


def counted(raw: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Bytes of a rank by part: 4 bits a weight and a byte for 16 of them; scales of rows and tiles are left out."""
    d, inner, experts = raw["hidden_size"], raw["moe_intermediate_size"], raw["n_routed_experts"]
    heads, groups = raw["num_attention_heads"] // ranks, raw["o_groups"] // ranks
    q, o, width = raw["q_lora_rank"], raw["o_lora_rank"], raw["head_dim"]
    index = raw["index_n_heads"] * raw["index_head_dim"]
    nvfp4 = plain = 0
    ratios = raw["compress_ratios"][: raw["num_hidden_layers"]]
    for layer, ratio in enumerate(ratios):
        nvfp4 += (q + width) * d + heads * width * q
        nvfp4 += groups * o * (heads * width // groups) + d * groups * o
        if ratio:
            nvfp4 += (2 if ratio == 4 else 1) * 2 * width * d
            plain += 4 * ratio * (2 if ratio == 4 else 1) * width  # positions of a window
        if ratio == 4:
            nvfp4 += index * q + 2 * 2 * raw["index_head_dim"] * d
            plain += 2 * raw["index_n_heads"] * d
        plain += 2 * experts * d + 2 * 4 * d  # router, norms in front of sublayers
        plain += 2 * 6 * 24 * 4 * d  # mHC of both sites, as three bf16 parts
        if layer < raw["num_hash_layers"]:
            plain += 8 * raw["num_experts_per_tok"] * raw["vocab_size"]
    return {
        EXPERTS: len(ratios) * (experts + raw["n_shared_experts"]) * 3 * d * inner // ranks * 9 // 16,
        MATRICES: nvfp4 * 9 // 16,
        VOCABULARY: 2 * 2 * raw["vocab_size"] * d // ranks,
        OTHERS: plain,
    }


@pytest.mark.parametrize(("model", "ranks"), [("flash", 4), ("flash", 8), ("pro", 8)])
def test_weights_of_a_rank(model: str, ranks: int) -> None:
    found, expected = of_rank(model, ranks).weights, counted(MODELS[model], ranks)
    assert [*found] == [*expected]
    for part, nbytes in expected.items():
        # Scales of rows, and small norms: up to 1.2 % of matrices, next to nothing of the rest.
        most = 1.012 if part == MATRICES else 1.003
        assert nbytes <= found[part] <= most * nbytes, (part, found[part] / nbytes)


def test_pro_fits_eight_h200s() -> None:
    found = of_rank("pro", 8)
    assert sum(found.weights.values()) / GB == pytest.approx(112.8, abs=0.05)
    on_h200 = found.with_free(H200)
    assert on_h200.problem() is None and on_h200.tokens is not None
    token = sum(found.token.values())
    left = H200 * 0.85 - sum(found.weights.values()) - sum(found.server.values())
    assert 0 <= left / token - on_h200.tokens < 256 and on_h200.tokens > 256 * 1280


def test_pro_does_not_fit_eight_h100s() -> None:
    """By how much is said: weights alone exceed the card."""
    found = of_rank("pro", 8, requests=64).with_free(H100)
    weights = sum(counted(PRO, 8).values())
    assert weights > H100
    problem = found.problem()
    assert problem is not None and "(42.84 GB too little)" in problem
    least = weights + sum(found.server.values()) + 10240 * sum(found.token.values())
    assert (least - 0.85 * H100) / GB == pytest.approx(42.84, rel=0.01)


@pytest.mark.parametrize("free", [H200, H100], ids=["H200", "H100"])
def test_flash_fits_eight_gpus_as_one_server_and_as_two(free: int) -> None:
    eight, four = (of_rank("flash", ranks).with_free(free) for ranks in (8, 4))
    for found in (eight, four):
        assert found.problem() is None
    assert eight.tokens is not None and four.tokens is not None
    # What every rank holds whole is held twice by two servers, and each token is in one of their pools.
    assert eight.tokens < 2 * four.tokens
