"""Pools that SGLang really allocates take what the forecast counts, with a draft and without one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.runtime_context import get_context

from nvfp4_sgl.cache.layout import DRAFTED_STATE_RING, STATE_RING, Rings
from nvfp4_sgl.config import ModelConfig
from nvfp4_sgl.memory.pools import bytes_per_server, bytes_per_token, draft_bytes_per_token, table_margin
from nvfp4_sgl.serving import kv_pool
from nvfp4_sgl.synthetic.tiny_config import TinyFormat, tiny_config

PAGE, RATIO = 256, 0.5
CONFIG = ModelConfig.from_dict(tiny_config(TinyFormat.BF16, {}))
RATIOS = [kind.value for kind in CONFIG.layer_kinds]
ALGORITHMS = {None: 0, "EAGLE": 4, "DSPARK": 6}
"""Tokens of a verify pass."""
ROWS = {None: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


@pytest.fixture(params=ALGORITHMS, ids=str)
def round_tokens(request: pytest.FixtureRequest) -> Iterator[int]:
    """Rows of a round of a server that drafts so, in whose process the test runs."""
    tokens = ALGORITHMS[request.param]
    given = {"speculative_algorithm": request.param, "speculative_num_draft_tokens": tokens} if tokens else {}
    with get_context().override_server_args(page_size=PAGE, **given, speculative_eagle_topk=1):
        yield tokens


def allocated(row_bytes: int | None, tokens: int, requests: int, ratios: list[int], rings: Rings) -> int:
    """Bytes of a pool with these layers, and of the table of slots where it is the model's."""
    kind: Any = DeepSeekV4TokenToKVPool
    if row_bytes is not None:
        kind = functools.partial(kv_pool.exact_rows_pool(), row_dtype=ROWS[row_bytes])
    window = int(tokens * RATIO)
    pool = kind(
        max_num_reqs=requests,
        num_req_slots=requests + 1,
        swa_size=window,
        c4_size=tokens // 4,
        c128_size=tokens // 128,
        c4_state_pool_size=window // PAGE * rings[4],
        c128_state_pool_size=0,
        page_size=PAGE,
        swa_page_size=PAGE,
        sliding_window=CONFIG.sliding_window,
        dtype=ROWS[row_bytes],
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=CONFIG.head_dim - CONFIG.qk_rope_head_dim,
        qk_rope_head_dim=CONFIG.qk_rope_head_dim,
        indexer_head_dim=CONFIG.index_head_dim,
        layer_num=len(ratios),
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=ratios,
        full_size=tokens,
    )
    return sum(tensor.nbytes for tensor in held(pool))


def held(pool: Any) -> Iterator[torch.Tensor]:
    yield from pool.swa_kv_pool.kv_buffer
    for each in pool.kv_pools.values():
        yield from each.kv_buffer if each is not None else ()
    for each in pool.index_pools.values():
        yield from each.index_k_with_scale_buffer if each is not None else ()
    for states in (pool.compress_state_pools, pool.indexer_compress_state_pools):
        yield from (state.kv_score_buffer.kv_score for state in states if state is not None)


@pytest.mark.parametrize("row_bytes", ROWS, ids=["packed", "bf16", "fp32"])
def test_a_pool_grows_as_forecast(round_tokens: int, row_bytes: int | None) -> None:
    """By tokens and by requests; what pools have beside that, a page of padding each, is the same."""
    rings = DRAFTED_STATE_RING if round_tokens else STATE_RING
    sizes = functools.partial(allocated, row_bytes, ratios=RATIOS, rings=rings)
    token = bytes_per_token(CONFIG, row_bytes, RATIO, rings=rings)
    assert sizes(8192, 4) - sizes(4096, 4) == 4096 * sum(token.values())
    states = [bytes_per_server(CONFIG, requests, 0, rings=rings)["ratio-128 states"] for requests in (4, 12)]
    assert sizes(4096, 12) - sizes(4096, 4) == states[1] - states[0]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("row_bytes", ROWS, ids=["packed", "bf16", "fp32"])
def test_a_drafts_pool_fits_what_is_kept_for_it(row_bytes: int | None, stages: int) -> None:
    """Window rows of each stage, at the model's slots."""
    sizes = functools.partial(allocated, row_bytes, requests=4, ratios=[0] * stages, rings=DRAFTED_STATE_RING)
    with get_context().override_server_args(page_size=PAGE, speculative_algorithm="EAGLE"):
        grown = sizes(8192) - sizes(4096)
    token = bytes_per_token(CONFIG, row_bytes, RATIO, rings=DRAFTED_STATE_RING)
    kept = draft_bytes_per_token(CONFIG, token, row_bytes, RATIO, stages=stages, layers=len(RATIOS))
    own = draft_bytes_per_token(CONFIG, {}, row_bytes, RATIO, stages=stages, layers=len(RATIOS))
    assert grown == 4096 * own and kept == max(own, sum(token.values()) / len(RATIOS))


def test_the_table_of_slots(round_tokens: int) -> None:
    assert allocation_sizing.get_req_to_token_extra_context_len() == table_margin(round_tokens)
