"""Bytes of SGLang's pools for DeepSeek-V4, as its ``DSV4PoolConfigurator`` (0.5.23) sizes them.

A token of a sequence has compressed entries for good; the share ``swa_ratio`` of tokens also has window rows, and each
page of window rows the states of the ratio-4 compressors. What belongs to requests is there once a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from nvfp4_sgl.cache.layout import PAGE_TOKENS, STATE_RING, Rings
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.formats import index_entry, kv_entry
from nvfp4_sgl.weights.parallel import Collective

STATE_BYTES = 4
"""An element of a compressor's state: fp32."""
TABLE_MARGIN = 4
"""Columns of the table of slots beyond the context length, where nothing is drafted."""

LEAST_WINDOW_TOKENS = 4 * PAGE_TOKENS
"""The smallest window pool in which a prompt that goes on from a cached prefix always runs, page by page
(:func:`largest_chunk`)."""


def largest_chunk(window_tokens: int) -> int:
    """Tokens of the largest prefill chunk, whole pages, that a window pool always has room for on an idle server.

    SGLang lets a prompt in while its chunk and a page more are fewer tokens than are left in the window pool; what it
    waits for otherwise never comes if nothing else runs. What is left lacks the pages of the cached prefix that the
    prompt goes on from: one node of the radix tree, at most an earlier chunk without its last page, but a page.

    Args:
        window_tokens: capacity of the window pool. With fewer than :data:`LEAST_WINDOW_TOKENS` no chunk is safe: 0.
    """
    pages = window_tokens // PAGE_TOKENS
    return max(min(pages - 3, (pages - 1) // 2), 0) * PAGE_TOKENS


def least_tokens(swa_ratio: float) -> int:
    """Tokens of capacity, whole pages, whose share ``swa_ratio`` of window rows is :data:`LEAST_WINDOW_TOKENS`."""
    return math.ceil(LEAST_WINDOW_TOKENS / PAGE_TOKENS / swa_ratio) * PAGE_TOKENS


def bytes_per_token(
    config: ModelConfig,
    row_bytes: int | None,
    swa_ratio: float,
    stage: range | None = None,
    rings: Rings = STATE_RING,
) -> dict[str, float]:
    """Bytes by kind of cache that each token of capacity takes.

    Args:
        row_bytes: of an element of exact rows; ``None`` for packed entries.
        swa_ratio: window rows a token. stage: layers, all unless given. rings: rows of the compressors' state rings.
    """
    kinds = [layer.kind for layer in config.layers(stage)]
    csa, hca = (kinds.count(kind) for kind in (LayerKind.CSA, LayerKind.HCA))
    state_width = 4 * (config.head_dim + config.index_head_dim)
    index = index_entry.FORMAT.page_bytes(1) if row_bytes is None else config.index_head_dim * row_bytes
    return {
        "window rows": swa_ratio * len(kinds) * _row(config, row_bytes, PAGE_TOKENS),
        "ratio-4 states": swa_ratio * csa * rings[4] / PAGE_TOKENS * state_width * STATE_BYTES,
        "ratio-4 entries": csa * _row(config, row_bytes, PAGE_TOKENS // 4) / 4,
        "index keys": csa * index / 4,
        "ratio-128 entries": hca * _row(config, row_bytes, PAGE_TOKENS // 128) / 128,
    }


def draft_bytes_per_token(
    config: ModelConfig, token: Mapping[str, float], row_bytes: int | None, swa_ratio: float, stages: int, layers: int
) -> float:
    """Bytes of a draft that each token of capacity takes: window rows of each stage.

    SGLang leaves a layer's share of ``token`` for them, whatever they take; where that is more, it counts.

    Args:
        token: as of :func:`bytes_per_token`, of ``layers``. row_bytes, swa_ratio: as there.
        stages: blocks of the draft.
    """
    return max(swa_ratio * stages * _row(config, row_bytes, PAGE_TOKENS), sum(token.values()) / layers)


def table_margin(round_tokens: int) -> int:
    """Columns of the table of slots beyond the context length: two rounds ahead, in whole pages.

    Args:
        round_tokens: of a verify pass; 0 where nothing is drafted.
    """
    return TABLE_MARGIN if round_tokens == 0 else max(TABLE_MARGIN + round_tokens, 2 * round_tokens + PAGE_TOKENS - 1)


def bytes_per_server(
    config: ModelConfig,
    requests: int,
    context: int,
    stage: range | None = None,
    rings: Rings = STATE_RING,
    round_tokens: int = 0,
) -> dict[str, int]:
    """Bytes that do not depend on the number of tokens.

    Args:
        requests: that run at once. context: tokens of the longest. stage, rings: as of :func:`bytes_per_token`.
        round_tokens: as of :func:`table_margin`.
    """
    ring, hca = rings[128], sum(layer.kind is LayerKind.HCA for layer in config.layers(stage))
    rows = -(-((requests + 1) * ring + ring + 1) // 128) * 128
    return {
        "ratio-128 states": hca * rows * 2 * config.head_dim * STATE_BYTES,
        "table of slots": (requests + 1) * (context + table_margin(round_tokens)) * 4,
    }


def inbox_bytes(config: ModelConfig, ranks: int, tokens: int) -> int:
    """Bytes of a rank's inboxes for sums whose parts are pushed: a bf16 row for each place, sender and token.

    Args:
        ranks: that send. tokens: of the largest pass that pushes.
    """
    return len(Collective) * ranks * tokens * config.hidden_size * 2


def _row(config: ModelConfig, row_bytes: int | None, page: int) -> float:
    return kv_entry.FORMAT.page_bytes(page) / page if row_bytes is None else config.head_dim * row_bytes
