"""SGLang's DeepSeek-V4 pool with exact rows: its slots, pages and state rings, our row layout.

Two modes:

* packed: SGLang's own pool, untouched (584-byte key/value entries, 132-byte indexer keys), chosen by
  ``--kv-cache-dtype fp8_e4m3``;
* exact: a row is ``head_dim`` (or ``index_head_dim``) numbers of the model dtype, or of bfloat16 where
  ``--kv-cache-dtype bfloat16`` asks for it. Default on the CPU.

Buffers of both are 2-D, one row a page. The compressor states are SGLang's in both modes (fp32, or bf16 by
``SGLANG_DSV4_COMPRESS_STATE_DTYPE``).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from nvfp4_sgl.architectures import is_served
from nvfp4_sgl.cache.layout import PAGE_TOKENS
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.memory.forecast import small_window
from nvfp4_sgl.memory.pools import largest_chunk
from nvfp4_sgl.serving.sglang import parallel, pools, settings
from nvfp4_sgl.serving.sglang.ledger import find

logger = logging.getLogger(__name__)

PACKED = "fp8_e4m3"
"""``--kv-cache-dtype`` of SGLang's packed pages."""


def row_dtype(kv_cache_dtype: str, asked_for: str, model_dtype: torch.dtype) -> torch.dtype | None:
    """dtype of exact rows, ``None`` in packed mode.

    Args:
        kv_cache_dtype: as resolved.
        asked_for: as given by the user ("auto" if not).
    """
    if kv_cache_dtype == PACKED:
        return None
    return model_dtype if asked_for == "auto" else torch.bfloat16


def describe_rows(dtype: torch.dtype | None) -> str:
    """The mode in words, for logs and ``/server_info``."""
    return "packed 584-byte entries" if dtype is None else f"exact rows in {str(dtype).removeprefix('torch.')}"


def _configurator_row_dtype(configurator: Any) -> torch.dtype | None:
    asked_for = settings.given_arguments(settings.served_arguments())["kv_cache_dtype"]
    return row_dtype(configurator.kv_cache_dtype_str, asked_for, configurator.model_config.dtype)


def _is_ours(configurator: Any) -> bool:
    return is_served(configurator.model_config.hf_config.architectures, drafts=True)


def allow_dsv4_pool(original: Callable[..., None], platform: Any, *, subsystem: str) -> None:
    """Hook: our platform may build DeepSeek-V4's pool; everything else stays refused."""
    if subsystem != "the DeepSeek-V4 KV pool":
        original(platform, subsystem=subsystem)


def build_pool(original: Callable[..., Any], configurator: Any, **kwargs: Any) -> Any:
    """Hook: build exact rows instead of packed pages where that mode is on; fit prefill chunks to the pool before."""
    if _is_ours(configurator) and not configurator.is_draft_worker:
        fit_chunk(
            kwargs["full_max_total_num_tokens"],
            kwargs["swa_max_total_num_tokens"],
            configurator.model_config.context_len,
        )
    dtype = _configurator_row_dtype(configurator)
    if dtype is None:
        return original(configurator, **kwargs)
    with pools.pool_class(functools.partial(exact_rows_pool(), row_dtype=dtype)):
        return original(configurator, **kwargs)


def fit_chunk(tokens: int, window_tokens: int, context: int) -> None:
    """Limit prefill chunks to what the window pool has room for, whatever prefix is cached.

    SGLang admits a larger one to no pass, and it waits at the head of the queue with every other request behind it.

    Args:
        tokens, window_tokens: capacity of the pool and of its window rows. context: tokens of the longest request.

    Raises:
        UnsupportedError: there is room for none.
    """
    room, asked_for = largest_chunk(window_tokens), settings.prefill_chunk()
    longest = -(-min(tokens, context) // PAGE_TOKENS) * PAGE_TOKENS
    if min(asked_for or longest, longest) <= room:
        return
    if not room:
        raise UnsupportedError(small_window(window_tokens))
    settings.set_prefill_chunk(room)
    if parallel.tp_rank() == 0:
        found = "no chunks" if asked_for is None else f"chunks of {asked_for}"
        logger.warning(
            "nvfp4_sgl: prompts are prefilled in chunks of %d tokens: a window pool of %d has no room for larger ones"
            " beside a cached prefix (--chunked-prefill-size: %s). Raise --max-total-tokens or --swa-full-tokens-ratio"
            " for larger chunks",
            room, window_tokens, found,
        )  # fmt: skip


def configure_pool(original: Callable[[Any], Any], configurator: Any) -> Any:
    """Hook: size the pool by the real bytes of a row."""
    if _is_ours(configurator):
        dtype = _configurator_row_dtype(configurator)
        if dtype is not None:
            return exact_rows_configurator()(configurator, row_dtype=dtype)
    return original(configurator)


# Classes are defined on first use, since SGLang's base classes import much.


@functools.cache
def _page_types() -> tuple[Any, Any]:
    """Pools of exact key/value rows and of exact indexer keys."""

    class ExactKvPages(find("DeepSeekV4SingleKVPool")):  # type: ignore[misc]
        """Key/value pages: [pages, page_size * head_dim] of ``dtype``."""

        def get_bytes_per_token(self) -> int:
            return (self.qk_nope_head_dim + self.qk_rope_head_dim) * self.dtype.itemsize

        def create_buffer(self, *, num_pages: int) -> torch.Tensor:
            self.kv_cache_total_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
            self.bytes_per_page_padded = self.page_size * self.get_bytes_per_token()
            shape = (num_pages, self.page_size * self.kv_cache_total_dim)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

    class ExactIndexPages(find("DeepSeekV4IndexerPool")):  # type: ignore[misc]
        """Indexer key pages: [pages, page_size * index_head_dim] of ``dtype``."""

        def get_bytes_per_token(self) -> int:
            return self.index_head_dim * self.dtype.itemsize

        def _create_buffer(self) -> None:
            # SGLang allocates bytes; the same bytes as numbers of our dtype.
            self.index_k_with_scale_buffer_dtype = torch.uint8
            super()._create_buffer()
            pages: list[torch.Tensor] = self.contiguous_page_row_buffers()
            self.index_k_with_scale_buffer = [page.view(self.dtype) for page in pages]

    return ExactKvPages, ExactIndexPages


@functools.cache
def exact_rows_pool() -> Any:
    """The class of pools with exact rows."""
    kv_pages, index_pages = _page_types()

    class ExactRowsPool(find("DeepSeekV4TokenToKVPool")):  # type: ignore[misc]
        """SGLang's pool of this model with exact rows."""

        def __init__(self, *args: Any, row_dtype: torch.dtype, **kwargs: Any):
            self.row_dtype = row_dtype
            super().__init__(*args, **kwargs)

        def _make_kv_pool(
            self,
            *,
            size: int,
            page_size: int,
            dtype: torch.dtype,
            layer_num: int,
            device: str,
            enable_memory_saver: bool,
            global_page_size: int,
            **_: Any,
        ) -> Any:
            return kv_pages(
                size,
                page_size,
                self.row_dtype,
                self.qk_nope_head_dim,
                self.qk_rope_head_dim,
                layer_num,
                device,
                enable_memory_saver,
                global_page_size=global_page_size,
            )

        def _make_indexer_pool(
            self,
            size: int,
            page_size: int,
            dtype: torch.dtype,
            index_head_dim: int,
            layer_num: int,
            device: str,
            enable_memory_saver: bool,
            force_fp4: bool = False,
            global_page_size: int | None = None,
            index_k_page8: bool = False,
        ) -> Any:
            assert not force_fp4 and not index_k_page8, "formats of DeepSeek-V4.1"
            return index_pages(
                size,
                page_size,
                self.row_dtype,
                index_head_dim,
                layer_num,
                device,
                enable_memory_saver,
                use_fp4_indexer=False,
                global_page_size=global_page_size,
            )

    return ExactRowsPool


@functools.cache
def exact_rows_configurator() -> Any:
    """The class that sizes :func:`exact_rows_pool`."""

    class ExactRowsConfigurator(find("DSV4PoolConfigurator")):  # type: ignore[misc]
        """SGLang's sizing with the bytes of exact rows."""

        def __init__(self, configurator: Any, *, row_dtype: torch.dtype):
            self.row_bytes = row_dtype.itemsize
            super().__init__(configurator)

        def _get_paged_kv_bytes_per_token(self, compress_ratio: int = 0) -> float:
            return self.attn_head_dim * self.row_bytes

        def _compressed_bytes_per_full_token(self, ratio: int) -> float:
            index = self.indexer_head_dim * self.row_bytes if ratio == LayerKind.CSA.value else 0
            return (self._get_paged_kv_bytes_per_token(ratio) + index) / ratio

    return ExactRowsConfigurator
