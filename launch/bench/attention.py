"""Sparse attention over packed entries, in decoding and prefill: Flash, one of its eight ranks, Pro."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from nvfp4_sgl.triton_kernels.attention import Entries, choose_splits, default_tiling, new_partials, sparse_attention
from nvfp4_sgl.triton_kernels.kv_entry import page_bytes, store_kv_entries

from . import Case

WINDOW, WINDOW_PAGE = 128, 256
HEADS_AND_TOPK = {"flash": (64, 512), "flash-tp8": (8, 512), "pro": (128, 1024)}
LAYERS = {"swa": (0, 1), "csa": (None, 64), "hca-64k": (512, 2), "hca-1m": (8192, 2)}
"""Compressed entries per query (``None``: the model's top-k) and their page size."""
QUERIES = (1, 8, 64, 256, 8192)
SCALE = 512**-0.5


def _pool(entries: int, page_size: int) -> Entries:
    pages = torch.empty(-(-entries // page_size), page_bytes(page_size), device="cuda", dtype=torch.uint8)
    slots = torch.arange(pages.shape[0] * page_size, device="cuda")
    store_kv_entries(torch.randn(slots.numel(), 512, device="cuda", dtype=torch.bfloat16), slots, pages, page_size)
    return Entries(pages, page_size)


def _lists(queries: int, columns: int, entries: int) -> Tensor:
    """Each query's own entries, anywhere in the pool, as decoding finds them."""
    return torch.randint(entries, (queries, columns), device="cuda", dtype=torch.int32)


def _flash_mla(
    q: Tensor, window: Entries, window_slots: Tensor, sink: Tensor, extra: Entries | None, extra_slots: Tensor | None
) -> dict[str, Callable[[], object]]:
    """FlashMLA as SGLang calls it, where it is installed and takes that many heads."""
    if importlib.util.find_spec("flash_mla") is None or q.shape[1] not in (64, 128):
        return {}
    flash_mla = importlib.import_module("flash_mla")

    def cache(entries: Entries | None) -> Tensor | None:
        if entries is None:
            return None
        pages, size = entries
        return pages[:, : size * 584].view(pages.shape[0], size, 1, 584)

    return {
        "flash_mla": partial(
            flash_mla.flash_mla_with_kvcache,
            q=q.unsqueeze(1),
            k_cache=cache(window),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=512,
            tile_scheduler_metadata=flash_mla.get_mla_metadata()[0],
            softmax_scale=SCALE,
            is_fp8_kvcache=True,
            indices=window_slots.unsqueeze(1),
            attn_sink=sink,
            extra_k_cache=cache(extra),
            extra_indices_in_kvcache=None if extra_slots is None else extra_slots.unsqueeze(1),
        )
    }


def cases() -> Iterator[Case]:
    """Bytes: every listed entry once per query, q and o; entries that queries share may come from the cache."""
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    for model, (heads, topk) in HEADS_AND_TOPK.items():
        for layer, (columns, page_size) in LAYERS.items():
            width = topk if columns is None else columns
            for queries in QUERIES:
                if queries * width > 8192 * 1024:
                    continue
                in_window, in_extra = max(queries * WINDOW, 4096), min(max(queries * width, 4096), 1 << 20)
                window, extra = _pool(in_window, WINDOW_PAGE), _pool(in_extra, page_size) if width else None
                window_slots = _lists(queries, WINDOW, in_window)
                extra_slots = _lists(queries, width, in_extra) if width else None
                q = torch.randn(queries, heads, 512, device="cuda", dtype=torch.bfloat16)
                sink, out = torch.randn(heads, device="cuda"), torch.empty_like(q)
                tiling = default_tiling(heads, packed=True)
                splits = choose_splits(queries, heads, (WINDOW, width), processors, tiling)
                keys = queries * (WINDOW + width)
                yield Case(
                    f"sparse_attention/{model}/{layer}/{queries}x{WINDOW + width}",
                    partial(
                        sparse_attention,
                        q,
                        window,
                        window_slots,
                        sink,
                        SCALE,
                        extra,
                        extra_slots,
                        splits=splits,
                        partials=new_partials(q, splits),
                        out=out,
                    ),
                    bytes=keys * 584 + q.nbytes + out.nbytes,
                    flops=keys * heads * 2 * (512 + 512),
                    peers=_flash_mla(q, window, window_slots, sink, extra, extra_slots),
                )
