"""Sparse attention over packed entries, in decoding and prefill: Flash and Pro, whole and as tensor-parallel ranks.

Peers, as SGLang calls them: FlashMLA's sparse decoding and SGLang's own Triton kernel over the same pages, FlashMLA's
sparse prefill over rows of bf16. Each gets the same lists, lengths and sink. Over packed entries ours normalises and
rotates the queries, as a layer asks for; the peers get them ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import compared, foreign, installed
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.triton_kernels.attention.sparse_attention import Entries, new_partials, new_semaphores, sparse_attention
from nvfp4_sgl.triton_kernels.attention.tiling import choose_splits, choose_tiling
from nvfp4_sgl.triton_kernels.common import chip
from nvfp4_sgl.triton_kernels.entries.kv_entry import page_bytes, store_kv_entries

from . import Case, Peer

WINDOW, WINDOW_PAGE = 128, 256
GROUP_HEADS = 8
"""Heads of a group of o_a, in both models."""
HEADS_AND_TOPK = {
    "flash": (64, 512),
    "flash-tp2": (32, 512),
    "flash-tp4": (16, 512),
    "flash-tp8": (8, 512),
    "pro": (128, 1024),
    "pro-tp8": (16, 1024),
}
LAYERS = {"swa": (0, 1), "csa": (None, 64), "hca-64k": (512, 2), "hca-1m": (8192, 2)}
"""Compressed entries per query (``None``: the model's top-k) and their page size."""
PROMPT = 8192
QUERIES = (1, 8, 64, 256, PROMPT)
LEAST_ENTRIES, MOST_ENTRIES = 4096, 1 << 20
"""Entries of a pool, at least and at most."""
SCALE = 512**-0.5
EPS = 1e-6


def _pool(entries: int, page_size: int) -> Entries:
    pages = torch.empty(-(-entries // page_size), page_bytes(page_size), device="cuda", dtype=torch.uint8)
    slots = torch.arange(pages.shape[0] * page_size, device="cuda")
    store_kv_entries(torch.randn(slots.numel(), 512, device="cuda", dtype=torch.bfloat16), slots, pages, page_size)
    return Entries(pages, page_size)


def _lists(queries: int, columns: int, entries: int) -> Tensor:
    """Each query's own entries, anywhere in the pool, as decoding finds them."""
    return torch.randint(entries, (queries, columns), device="cuda", dtype=torch.int32)


def _all_of(queries: int, columns: int) -> Tensor:
    return torch.full((queries,), columns, device="cuda", dtype=torch.int32)


def _cache(entries: Entries | None) -> Tensor | None:
    """The pages as the peers want them, [pages, page size, 1, 584], without their padding."""
    if entries is None:
        return None
    pages, size = entries
    return pages[:, : size * 584].view(pages.shape[0], size, 1, 584)


def _paged(
    q: Tensor,
    window: Entries,
    window_slots: Tensor,
    sink: Tensor,
    extra: Entries | None,
    extra_slots: Tensor | None,
    lengths: tuple[Tensor, Tensor],
    out: Tensor,
) -> dict[str, Peer]:
    """Peers over packed entries.

    FlashMLA takes 64 or 128 heads; SGLang pads fewer, sinks too, and so does this, outside the measured time. Its
    schedule is made by the first run and kept, as SGLang keeps it for a step's layers.
    """
    heads = q.shape[1]
    padding = (64 if heads <= 64 else 128) - heads
    arguments = {
        "k_cache": _cache(window),
        "head_dim_v": 512,
        "softmax_scale": SCALE,
        "indices": window_slots.unsqueeze(1),
        "topk_length": lengths[0],
        "extra_k_cache": _cache(extra),
        "extra_indices_in_kvcache": None if extra_slots is None else extra_slots.unsqueeze(1),
        "extra_topk_length": None if extra is None else lengths[1],
    }

    def result(op: Callable[..., Any], **own: Any) -> Tensor:
        found: Tensor = op(**arguments, **own)[0]
        return found.squeeze(1)[:, :heads]

    peers = {}
    if installed("flash_mla"):
        mla, schedule = foreign("flash_mla", "flash_mla_with_kvcache"), cache(foreign("flash_mla", "get_mla_metadata"))
        padded = torch.nn.functional.pad(q, (0, 0, 0, padding)).unsqueeze(1)
        sinks = torch.nn.functional.pad(sink, (0, padding))

        def decode() -> Tensor:
            return result(
                mla,
                q=padded,
                attn_sink=sinks,
                block_table=None,
                cache_seqlens=None,
                tile_scheduler_metadata=schedule()[0],
                is_fp8_kvcache=True,
                use_legacy=True,  # the kernels that read entries of 584 bytes
            )

        peers["flash_mla"] = compared(decode, out)
    if installed("sglang"):
        op = foreign("sglang.kernels.ops.attention.dsv4.triton_sparse_decode", "triton_fp8_attention_fwd")
        peers["sglang triton"] = compared(partial(result, op, q=q.unsqueeze(1), attn_sink=sink), out)
    return peers


def _prefill(q: Tensor, rows: Tensor, slots: Tensor, sink: Tensor, out: Tensor) -> dict[str, Peer]:
    """FlashMLA's prefill over one pool of bf16 rows [n, 512] and one list; it takes 64 or 128 heads.

    SGLang decodes a chunk's window and entries to such rows first, by kernels of its own; that is not counted here.
    """
    if not installed("flash_mla") or q.shape[1] not in (64, 128):
        return {}
    op, lengths = foreign("flash_mla", "flash_mla_sparse_fwd"), _all_of(*slots.shape)

    def run() -> Tensor:
        found: Tensor = op(
            q=q,
            kv=rows.unsqueeze(1),
            indices=slots.unsqueeze(1),
            sm_scale=SCALE,
            attn_sink=sink,
            topk_length=lengths,
            use_legacy=True,
            return_log2_lse=True,
        )[0]
        return found

    return {"flash_mla": compared(run, out)}


def cases() -> Iterator[Case]:
    """Bytes: every listed entry once per query, q and o; entries that queries share may come from the cache."""
    processors = chip.processors(torch.device("cuda"))
    for model, (heads, topk) in HEADS_AND_TOPK.items():
        for layer, (columns, page_size) in LAYERS.items():
            width = topk if columns is None else columns
            for queries in QUERIES:
                if queries * width > 8192 * 1024:
                    continue
                in_window = max(queries * WINDOW, LEAST_ENTRIES)
                in_extra = min(max(queries * width, LEAST_ENTRIES), MOST_ENTRIES)
                window, extra = _pool(in_window, WINDOW_PAGE), _pool(in_extra, page_size) if width else None
                window_slots = _lists(queries, WINDOW, in_window)
                extra_slots = _lists(queries, width, in_extra) if width else None
                lengths = _all_of(queries, WINDOW), _all_of(queries, width)
                q = torch.randn(queries, heads, 512, device="cuda", dtype=torch.bfloat16)
                cos_sin = torch.tensor([1.0, 0.0], device="cuda").repeat(queries, 32)  # by nothing
                ready = torch.nn.functional.rms_norm(q.float(), (512,), eps=EPS).bfloat16()
                sink, out = torch.randn(heads, device="cuda"), torch.empty_like(q)
                tiling = choose_tiling(queries, heads, (WINDOW, width), processors, packed=True)
                splits = choose_splits(queries, heads, (WINDOW, width), processors, tiling)
                keys = queries * (WINDOW + width)
                shape = f"{model}/{layer}/{queries}x{WINDOW + width}"
                run = partial(
                    sparse_attention,
                    q,
                    window,
                    window_slots,
                    sink,
                    SCALE,
                    extra,
                    extra_slots,
                    window_lengths=lengths[0],
                    extra_lengths=lengths[1] if width else None,
                    cos_sin=cos_sin,
                    query_eps=EPS,
                    splits=splits,
                    semaphores=new_semaphores(queries, heads, "cuda"),
                    tiling=tiling,
                )
                rows = Rows.allocate(queries, GROUP_HEADS * 512, 128, "cuda", groups=heads // GROUP_HEADS)
                yield Case(
                    f"sparse_attention, quantised/{shape}",
                    partial(run, partials=new_partials(q, splits, quantized=True), out_rows=rows),
                    bytes=keys * 584 + q.nbytes + q.nbytes * 9 // 32 + cos_sin.nbytes,
                    flops=keys * heads * 2 * (512 + 512),
                )
                yield Case(
                    f"sparse_attention/{shape}",
                    partial(run, partials=new_partials(q, splits), out=out),
                    bytes=keys * 584 + q.nbytes + out.nbytes + cos_sin.nbytes,
                    flops=keys * heads * 2 * (512 + 512),
                    peers=_paged(ready, window, window_slots, sink, extra, extra_slots, lengths, out),
                )
        yield _prefill_of_rows(model, heads, WINDOW + topk)


def _prefill_of_rows(model: str, heads: int, width: int) -> Case:
    """Rows of bf16 in one pool, one list a query: the job of FlashMLA's prefill."""
    queries = PROMPT
    rows = torch.randn(MOST_ENTRIES, 512, device="cuda", dtype=torch.bfloat16)
    slots = _lists(queries, width, MOST_ENTRIES)
    q = torch.randn(queries, heads, 512, device="cuda", dtype=torch.bfloat16)
    sink, out = torch.randn(heads, device="cuda"), torch.empty_like(q)
    entries = Entries(rows.view(-1, WINDOW_PAGE * 512), WINDOW_PAGE)
    run = partial(sparse_attention, q, entries, slots, sink, SCALE, splits=1, out=out)
    return Case(
        f"sparse_attention of bf16 rows/{model}/{queries}x{width}",
        run,
        bytes=queries * width * 1024 + q.nbytes + out.nbytes,
        flops=queries * width * heads * 2 * (512 + 512),
        peers=_prefill(q, rows, slots, sink, out),
    )
