"""Caches with no server: the server's slot arithmetic over buffers of our own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import PAGE_TOKENS, STATE_RING, Rings
from nvfp4_sgl.cache.rows import RowStore, row_store
from nvfp4_sgl.config import LayerSpec, ModelConfig
from nvfp4_sgl.formats import index_entry, kv_entry
from nvfp4_sgl.formats.pages import RowFormat


class LocalCaches:
    """Every layer's caches for a fixed number of sequences, and the plans over them.

    Page 0 is left for padding, as the server leaves it. The others are dealt in a random order, SWA pages in another
    than full pages, and all buffers start poisoned, so that a wrong slot shows.

    Attributes:
        padding_request: the request slot of padding, one more than the sequences have; the server's is 0.

    Args:
        requests: sequences; capacity: tokens of each, rounded up to whole pages.
        packed: SGLang's 8-bit entries instead of rows in ``dtype``.
        device: where the rows are; slots are planned on the CPU.
        rings: rows of the compressors' state rings.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        requests: int = 1,
        capacity: int = 2048,
        packed: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rings: Rings = STATE_RING,
    ):
        self._config, self._requests, self._packed, self._dtype, self._device = config, requests, packed, dtype, device
        self.rings = rings
        self.capacity = -(-capacity // PAGE_TOKENS) * PAGE_TOKENS
        pages = requests * self.capacity // PAGE_TOKENS
        generator = torch.Generator().manual_seed(0)

        def deal() -> torch.Tensor:
            order = 1 + torch.randperm(pages, generator=generator)
            return (order[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()

        self.padding_request = requests
        padding = torch.zeros(1, self.capacity, dtype=torch.int64)
        self._full_slots = torch.cat([deal().view(requests, self.capacity), padding])
        self._full_to_swa = torch.cat([torch.arange(PAGE_TOKENS), deal()])
        self.lengths = [0] * requests
        self.layers = [self._layer(layer, 1 + pages) for layer in config.layers()]

    def _rows(self, pages: int, page_size: int, dim: int, format: RowFormat = kv_entry.FORMAT) -> RowStore:
        columns, poison = page_size * dim, float("nan")
        if self._packed:
            columns, poison = format.page_bytes(page_size), 0xFF
        dtype = torch.uint8 if self._packed else self._dtype
        buffer = torch.full((pages, columns), poison, dtype=dtype, device=self._device)
        return row_store(buffer, page_size, dim, format)

    def _layer(self, layer: LayerSpec, pages: int) -> LayerCache:
        config, ratio = self._config, layer.ratio
        swa = self._rows(pages, PAGE_TOKENS, config.head_dim)
        if not layer.compresses:
            return LayerCache(swa)
        rows = (pages if layer.kind.keeps_state_by_page else self._requests + 1) * self.rings[ratio]
        compressed = self._rows(pages, PAGE_TOKENS // ratio, config.head_dim)

        def state(width: int) -> torch.Tensor:
            return torch.full((rows, width), float("nan"), device=self._device)

        if not layer.selects:
            return LayerCache(swa, compressed, state=state(2 * config.head_dim))
        index = self._rows(pages, PAGE_TOKENS // ratio, config.index_head_dim, index_entry.FORMAT)
        return LayerCache(swa, compressed, index, state(4 * config.head_dim), state(4 * config.index_head_dim))

    @property
    def slots(self) -> torch.Tensor:
        """int64 [requests + 1, capacity], the full slot of every position; those of the padding are 0."""
        return self._full_slots

    @property
    def full_to_swa(self) -> torch.Tensor:
        """int64, window slot of every full slot."""
        return self._full_to_swa

    def advance(self, counts: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Append ``counts[request]`` tokens to each request named: their lengths before and after."""
        starts = [self.lengths[request] for request in counts]
        ends = [start + count for start, count in zip(starts, counts.values(), strict=True)]
        if max(ends) > self.capacity:
            raise ValueError(f"a sequence of {max(ends)} tokens exceeds the capacity of {self.capacity}")
        for request, end in zip(counts, ends, strict=True):
            self.lengths[request] = end
        return starts, ends

    def take_back(self, request: int, length: int) -> None:
        """Let a request be as long as before its last tokens, which were rejected; their rows stay, and are stale."""
        if not 0 < length <= self.lengths[request]:
            raise ValueError(f"request {request} has {self.lengths[request]} tokens, expected {length} or more")
        self.lengths[request] = length

    def share_prefix(self, source: int, target: int, pages: int) -> None:
        """Let ``target`` begin with the first whole pages of ``source``, as after a hit in the prefix cache."""
        tokens = pages * PAGE_TOKENS
        if tokens > self.lengths[source]:
            raise ValueError(f"request {source} has {self.lengths[source]} tokens, expected {tokens} or more")
        self._full_slots[target, :tokens] = self._full_slots[source, :tokens]
        self.lengths[target] = tokens
