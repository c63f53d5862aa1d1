"""The model with no server around it: own caches, trivial slots, logits out.

For tests, debugging and measurements. Slots, pages, rings and plans are those of the server, so what passes here
exercises the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import PAGE_TOKENS, STATE_RING
from nvfp4_sgl.cache.plan import Batch, plan_batch
from nvfp4_sgl.cache.rows import ExactRows, PackedIndexRows, PackedKvRows, RowStore
from nvfp4_sgl.checkpoint.inventory import Inventory
from nvfp4_sgl.checkpoint.reader import CheckpointReader
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.model.decoder import Decoder
from nvfp4_sgl.numerics import index_entry, kv_entry
from nvfp4_sgl.ops.dispatch import Ops, Target, load_ops
from nvfp4_sgl.ops.linear import ActivationMode


class Standalone:
    """A decoder with caches for ``requests`` sequences of up to ``capacity`` tokens on the CPU.

    Args:
        path: checkpoint directory.
        mode: what enters products with NVFP4 weights.
        packed: keep rows in SGLang's 8-bit entries instead of ``dtype``.
        dtype: model dtype.
        ops: implementations; the CPU references unless given.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mode: ActivationMode = ActivationMode.W4A16,
        packed: bool = False,
        dtype: torch.dtype = torch.float32,
        requests: int = 4,
        capacity: int = 2048,
        ops: Ops | None = None,
    ):
        self.config = ModelConfig.from_dir(path)
        inventory = Inventory.open(path)
        inventory.verify(self.config)
        reader = CheckpointReader(inventory)
        self._embed = reader.read("embed.weight").to(dtype)
        self._head = reader.read("head.weight").to(dtype)
        self.decoder = Decoder(reader, self.config, ops or load_ops(Target.CPU), mode)
        reader.finish()
        self._capacity = -(-capacity // PAGE_TOKENS) * PAGE_TOKENS
        self._requests, self._packed, self._dtype = requests, packed, dtype
        # Pages are dealt to requests in an order that is neither sequential nor contiguous, so that a mistake in
        # slot arithmetic shows; SWA pages in another order than full pages.
        pages = requests * self._capacity // PAGE_TOKENS
        generator = torch.Generator().manual_seed(0)
        within = torch.arange(PAGE_TOKENS)
        full_pages = torch.randperm(pages, generator=generator)
        self._full_slots = (full_pages[:, None] * PAGE_TOKENS + within).view(requests, self._capacity)
        swa_pages = torch.randperm(pages, generator=generator)
        self._full_to_swa = (swa_pages[:, None] * PAGE_TOKENS + within).flatten()
        self._lengths = [0] * requests
        self.caches = [self._layer_cache(layer, pages) for layer in range(self.config.num_hidden_layers)]
        self._ratios = frozenset(k.value for k in self.config.layer_kinds if k is not LayerKind.SWA)

    def _rows(self, pages: int, page_size: int, dim: int, *, index: bool = False) -> RowStore:
        if not self._packed:
            return ExactRows(torch.full((pages, page_size * dim), float("nan"), dtype=self._dtype), dim)
        if index:
            buffer = torch.full((pages, index_entry.page_bytes(page_size)), 0xFF, dtype=torch.uint8)
            return PackedIndexRows(buffer, page_size)
        buffer = torch.full((pages, kv_entry.page_bytes(page_size)), 0xFF, dtype=torch.uint8)
        return PackedKvRows(buffer, page_size)

    def _layer_cache(self, layer: int, pages: int) -> LayerCache:
        config, ratio = self.config, self.config.kind(layer).value
        swa = self._rows(pages, PAGE_TOKENS, config.head_dim)
        if not ratio:
            return LayerCache(swa)
        rings = pages if ratio == 4 else self._requests
        rows = rings * STATE_RING[ratio]
        width = config.head_dim * (2 if ratio == 4 else 1)
        compressed = self._rows(pages, PAGE_TOKENS // ratio, config.head_dim)
        state = torch.full((rows, 2 * width), float("nan"))
        if ratio == 128:
            return LayerCache(swa, compressed, state=state)
        index = self._rows(pages, PAGE_TOKENS // ratio, config.index_head_dim, index=True)
        index_state = torch.full((rows, 4 * config.index_head_dim), float("nan"))
        return LayerCache(swa, compressed, index, state, index_state)

    def reset(self) -> None:
        """Forget every sequence; caches keep their stale contents, as a server's do."""
        self._lengths = [0] * self._requests

    @torch.no_grad()
    def extend(self, tokens: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        """Append tokens to sequences (prefill, chunk or decode alike).

        Args:
            tokens: new token ids by request, at least one each.

        Returns:
            fp32 logits [new tokens, vocab] by request.
        """
        requests = list(tokens)
        starts = [self._lengths[r] for r in requests]
        ends = [s + len(tokens[r]) for s, r in zip(starts, requests, strict=True)]
        if max(ends) > self._capacity:
            raise ValueError(f"sequence of {max(ends)} tokens exceeds the capacity of {self._capacity}")
        batch = Batch(
            starts=torch.tensor(starts),
            ends=torch.tensor(ends),
            requests=torch.tensor(requests),
            full_slots=self._full_slots[requests],
            full_to_swa=self._full_to_swa,
        )
        plan = plan_batch(batch, window=self.config.sliding_window, ratios=self._ratios)
        ids = torch.tensor([t for r in requests for t in tokens[r]])
        hidden = self.decoder(self._embed[ids], ids, plan, self.caches)
        for request, end in zip(requests, ends, strict=True):
            self._lengths[request] = end
        logits = hidden.float() @ self._head.float().t()
        return dict(zip(requests, logits.split([len(tokens[r]) for r in requests]), strict=True))
