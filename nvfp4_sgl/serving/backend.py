"""The attention backend: turns SGLang's forward batch into a plan, and SGLang's pools into row stores.

Registered under the name ``nvfp4_sgl``. The model does the attention itself; SGLang asks a backend only to prepare each
batch's metadata. :class:`PoolBackend` is what all targets share, :class:`Nvfp4AttentionBackend` the CPU's.
"""

from __future__ import annotations

from typing import Any

import torch

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.cache.layout import PAGE_TOKENS, STATE_RING
from nvfp4_sgl.cache.plan import Batch, plan_batch
from nvfp4_sgl.cache.rows import ExactRows, PackedIndexRows, PackedKvRows, RowStore
from nvfp4_sgl.config import LayerKind, ModelConfig
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.serving import sglang_private as private


class PoolBackend(private.AttentionBackend):  # type: ignore[misc, valid-type]
    """What knows SGLang's pools.

    Attributes:
        plan: what the decoder is given of the current batch; ``None`` for an idle one.
        caches: one :class:`LayerCache` a layer, views of SGLang's pools made once.
    """

    def __init__(self, runner: Any):
        super().__init__()
        private.require_own_model(runner.model)
        if runner.page_size != PAGE_TOKENS:
            raise UnsupportedError(
                f"--page-size {runner.page_size}: DeepSeek-V4's pools need {PAGE_TOKENS}; leave it out"
            )
        self.device = runner.device
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.page_size = runner.page_size
        self.config: ModelConfig = runner.model.model_config
        layers = range(self.config.num_hidden_layers)
        self.caches = [layer_cache(self.token_to_kv_pool, self.config, layer) for layer in layers]
        self.plan: Any = None

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False


class Nvfp4AttentionBackend(PoolBackend):
    """Plans every forward pass of our DeepSeek-V4 on the CPU: ``plan`` is a :class:`nvfp4_sgl.cache.plan.BatchPlan`."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan an eager pass from request slots, lengths and the request-to-token table."""
        if forward_batch.forward_mode.is_idle():
            self.plan = None
            return
        ends = forward_batch.seq_lens.long()
        if forward_batch.forward_mode.is_decode():
            starts = ends - 1
        else:
            starts = ends - forward_batch.extend_seq_lens.long()
        requests = forward_batch.req_pool_indices.long()
        table = self.req_to_token_pool.req_to_token
        batch = Batch(
            starts=starts,
            ends=ends,
            requests=requests,
            full_slots=table[requests, : int(ends.max())].long(),
            full_to_swa=private.full_to_swa_mapping(self.token_to_kv_pool),
        )
        ratios = frozenset(kind.value for kind in self.config.layer_kinds if kind is not LayerKind.SWA)
        self.plan = plan_batch(batch, window=self.config.sliding_window, ratios=ratios)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate: this path is eager."""


def layer_cache(pool: Any, config: ModelConfig, layer: int) -> LayerCache:
    """Row stores over one layer's buffers of SGLang's pool, exact or packed by the buffers' dtype."""
    ratio = config.kind(layer).value
    swa = _rows(private.swa_buffer(pool, layer), PAGE_TOKENS, config.head_dim)
    if not ratio:
        return LayerCache(swa)
    compressed = _rows(private.compressed_buffer(pool, layer), PAGE_TOKENS // ratio, config.head_dim)
    state = private.compress_state(pool, layer, ring=STATE_RING[ratio])
    if ratio == LayerKind.HCA.value:
        return LayerCache(swa, compressed, state=state)
    index = _rows(private.index_buffer(pool, layer), PAGE_TOKENS // ratio, config.index_head_dim, index=True)
    return LayerCache(swa, compressed, index, state, private.index_compress_state(pool, layer, ring=STATE_RING[ratio]))


def _rows(buffer: torch.Tensor, page_size: int, dim: int, *, index: bool = False) -> RowStore:
    if buffer.dtype in (torch.float32, torch.bfloat16):
        return ExactRows(buffer, dim)
    return PackedIndexRows(buffer, page_size) if index else PackedKvRows(buffer, page_size)
