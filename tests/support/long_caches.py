"""Caches as they stand behind a long text that nothing has computed: entries of random values, packed like any other.

A prompt of a million tokens would take the CPU reference hours. A pass behind it needs only what it reads: all
compressed entries and index keys, and of the window rows and the compressors' states the last ones. Everything else
stays poisoned, so that a read of it shows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import STATE_RING, entry_slot, state_row
from nvfp4_sgl.cache.local import LocalCaches
from nvfp4_sgl.cache.rows import RowStore
from nvfp4_sgl.formats import index_entry, kv_entry

WINDOW = 128
ROWS_AT_ONCE = 1 << 15


def fill_randomly(caches: LocalCaches, cached: Mapping[int, int]) -> None:
    """Let ``caches``, packed and on the CPU, hold ``cached`` tokens of each request in every layer."""
    generator = torch.Generator().manual_seed(2)
    for request, count in cached.items():
        caches.lengths[request] = count
        for cache in caches.layers:
            _fill(cache, request, caches.slots[request, :count], caches.full_to_swa, generator)


def _fill(cache: LayerCache, request: int, full: Tensor, full_to_swa: Tensor, generator: torch.Generator) -> None:
    """One request's rows of one layer; ``full``: the full slot of each cached position, int64 [tokens]."""
    _write(cache.swa, full_to_swa[full[-WINDOW:]], kv_entry.DIM, generator)
    ratio = 4 if cache.index is not None else 128
    entries = entry_slot(full[: len(full) // ratio * ratio : ratio], ratio)
    if cache.compressed is not None:
        _write(cache.compressed, entries, kv_entry.DIM, generator)
    if cache.index is not None:
        _write(cache.index, entries, index_entry.DIM, generator)
    last = torch.arange(max(len(full) - STATE_RING[ratio], 0), len(full))
    rows = state_row(ratio, request=torch.tensor(request), position=last, swa_slot=full_to_swa[full[last]])
    for state in (cache.state, cache.index_state):
        if state is not None:
            state[rows] = torch.randn(len(rows), state.shape[1], generator=generator)


def _write(store: RowStore, slots: Tensor, dim: int, generator: torch.Generator) -> None:
    """Rows of unit variance, as a norm leaves them."""
    for some in slots.split(ROWS_AT_ONCE):
        store.write(some, torch.randn(len(some), dim, generator=generator))
