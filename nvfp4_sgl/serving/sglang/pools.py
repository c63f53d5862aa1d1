"""The pools of DeepSeek-V4's keys and values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving.sglang.ledger import find, module


@contextlib.contextmanager
def pool_class(replacement: Any) -> Iterator[None]:
    """Inside the context ``_build_dsv4_kv_pool`` builds ``replacement``."""
    builder, name = module("kv_cache_configurator"), "DeepSeekV4TokenToKVPool"
    original = getattr(builder, name)
    setattr(builder, name, replacement)
    try:
        yield
    finally:
        setattr(builder, name, original)


def verify_mask(requests: Any, runner: Any, rows: int) -> Any:
    """A mask of the rows of a round that nothing reads, for the backend of ``runner``; ``None`` if it verifies nothing.

    Args:
        requests: SGLang's pool of request slots. rows: of a round, 1 without drafts.
    """
    return find("maybe_create_verify_mask")(
        is_draft_runner=runner.is_draft_worker,
        skip_prefill=rows == 1,
        max_bs=requests.size,
        max_context_len=0,
        num_draft_tokens=rows,
        device=runner.device,
        is_read=False,
    )


def full_to_swa_mapping(pool: Any) -> Tensor:
    """SWA slot of each full slot, int64 [full slots + one page, + 1]; kept up to date by SGLang's allocator."""
    return pool.full_to_swa_index_mapping


def swa_buffer(pool: Any, layer: int) -> Tensor:
    """Sliding-window pages of ``layer``: [pages, page bytes or 256 * head_dim]."""
    return pool.swa_kv_pool.kv_buffer[layer - pool._stage_start]


def compressed_buffer(pool: Any, layer: int) -> Tensor:
    """Pages of compressed entries of ``layer`` (ratio 4: 64 a page, ratio 128: 2 a page)."""
    item = pool.layer_mapping[layer]
    return item.compress_kv_pool.kv_buffer[item.compress_layer_id]


def index_buffer(pool: Any, layer: int) -> Tensor:
    """Pages of indexer keys of ``layer`` (64 a page)."""
    item = pool.layer_mapping[layer]
    return pool.index_pools[item.compress_ratio].index_k_with_scale_buffer[item.compress_layer_id]


def compress_state(pool: Any, layer: int, *, ring: int) -> Tensor:
    """Raw (kv, score) rows of the layer's compressor: [rows, 2 w], rows as in :mod:`nvfp4_sgl.cache.layout`."""
    return _state_rows(pool.compress_state_pools[layer], ring)


def index_compress_state(pool: Any, layer: int, *, ring: int) -> Tensor:
    """Raw (kv, score) rows of the compressor inside the layer's indexer."""
    return _state_rows(pool.indexer_compress_state_pools[layer], ring)


def _state_rows(states: Any, ring: int) -> Tensor:
    if states.ring_size != ring or states.online:
        raise UnsupportedError(
            f"SGLang keeps {states.ring_size} compressor state rows (online={states.online}), expected {ring};"
            " unset SGLANG_OPT_USE_ONLINE_COMPRESS"
        )
    return states.kv_score_buffer.kv_score
