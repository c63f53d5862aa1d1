"""The plan of a pass, in decoding and prefill, at contexts of 4k to 1M.

Peer: the Triton kernels that plan SGLang's pass. Beside our slots they write the ratio-4 bookkeeping, and they read a
table of pages for each token, whose own making is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.peers import foreign, installed
from nvfp4_sgl.triton_kernels.plan.batch import PAGE_TOKENS
from nvfp4_sgl.triton_kernels.plan.resolve import Plan, resolve

from . import Case, Peer, relative_error

CONTEXTS = {"4k": 4096, "64k": 65536, "1m": 1 << 20}
DECODING = (1, 8, 64, 256)
PROMPT = 8192
WINDOW, RATIO = 128, 128
SLOTS = 1 << 22
"""Slots of the pool; requests of more tokens together share them."""


def cases() -> Iterator[Case]:
    for name, context in CONTEXTS.items():
        for requests in DECODING:
            yield _resolve(f"resolve/decode/{name}/{requests}x{context}", requests, 1, context)
        added = min(PROMPT, context)
        yield _resolve(f"resolve/prefill/{name}/{added}x{context}", 1, added, context)


def _resolve(name: str, requests: int, added: int, context: int) -> Case:
    """Each request's last tokens of a context of its own."""
    held = torch.arange(requests * context // PAGE_TOKENS, device="cuda") % (SLOTS // PAGE_TOKENS)
    slots = (held.int()[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device="cuda")).int()
    slots = slots.view(requests, context)
    positions = torch.arange(context - added, context, device="cuda").repeat(requests)
    owners = torch.arange(requests, device="cuda")
    full_to_swa = torch.arange(SLOTS, device="cuda")
    plan = Plan.allocate(
        positions, owners, slots, full_to_swa, window=WINDOW, longest=context, tokens_each=1 if added == 1 else None
    )
    lengths = torch.full((requests,), context, device="cuda", dtype=torch.int32)
    new = None if added == 1 else torch.full_like(lengths, added)

    pages = requests * (context // PAGE_TOKENS) * 4
    written = len(positions) * (WINDOW + 4) * 4 + 4 * int(((positions + 1) // RATIO).sum()) + pages
    read = requests * ((min(WINDOW - 1, context - added) + added) * 12 + context // RATIO * 4) + positions.nbytes
    return Case(
        name,
        partial(resolve, plan, lengths, new),
        bytes=written + read,
        peers=_peers(plan, slots, full_to_swa, owners.repeat_interleave(added), positions),
    )


def _peers(
    plan: Plan, slots: torch.Tensor, full_to_swa: torch.Tensor, owners: torch.Tensor, positions: torch.Tensor
) -> dict[str, Peer]:
    if not installed("sglang"):
        return {}
    folder = "sglang.kernels.ops.attention.dsv4"
    window = foreign(f"{folder}.attn_metadata_kernels", "build_causal_swa_page_indices_triton")
    compressed = foreign(f"{folder}.metadata_kernel", "init_compression_metadata")
    ends = (positions + 1).int()
    written = slots[owners, positions].long()
    page_table = (slots[:, ::PAGE_TOKENS] // PAGE_TOKENS)[owners].contiguous()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        windows: torch.Tensor = window(
            req_to_token=slots,
            full_to_swa_mapping=full_to_swa,
            req_pool_indices_repeated=owners,
            seq_lens_casual=ends,
            swa_window=WINDOW,
            page_index_aligned_size=64,
        )
        entries: torch.Tensor = compressed(ends, positions.int(), written, page_table, PAGE_TOKENS, True)[8]
        return windows, entries

    def error() -> float:
        windows, entries = run()
        seen = torch.arange(entries.shape[1], device="cuda") < plan.entry_lengths[:, None]
        ours = torch.where(seen, plan.entry_slots, -1)
        return max(relative_error(windows, plan.window_slots), relative_error(entries, ours))

    return {"sglang swa indices, compression metadata": Peer(run, error, limit=0.0)}
