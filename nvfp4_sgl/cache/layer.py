"""One layer's caches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nvfp4_sgl.cache.rows import RowStore


@dataclass(frozen=True)
class LayerCache:
    """The row stores and states that a layer reads and writes.

    Attributes:
        swa: the sliding window's key/value rows.
        compressed: compressed entries (CSA, HCA).
        index: indexer keys (CSA).
        state: raw rows of the main compressor [rows, 2w] (CSA, HCA).
        index_state: raw rows of the indexer's compressor (CSA).
    """

    swa: RowStore
    compressed: RowStore | None = None
    index: RowStore | None = None
    state: Tensor | None = None
    index_state: Tensor | None = None
