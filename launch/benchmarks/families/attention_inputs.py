"""The inputs of attention, from the output of the layer's first GEMM: latents, compression, and both in one launch.

Flash and Pro have the same compressors, and a context's length only says where its windows begin. Peers: SGLang's and
sgl_kernel's kernels, one after another (``compressor_peers`` for the windows).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.peers import compared, foreign, installed
from benchmarks.peers.compressor import compress_peers
from nvfp4_sgl.cache.layout import STATE_RING
from nvfp4_sgl.config import LayerKind
from nvfp4_sgl.ops.rope import inverse_frequencies
from nvfp4_sgl.triton_kernels.attention_inputs.compressor import Compression, Compressor, new_workspace
from nvfp4_sgl.triton_kernels.attention_inputs.latent import Latents
from nvfp4_sgl.triton_kernels.attention_inputs.prepare import TWO_LAUNCH_MIN_TOKENS, prepare_attention
from nvfp4_sgl.triton_kernels.common.rope import rope_cos_sin
from nvfp4_sgl.triton_kernels.entries import index_entry, kv_entry
from nvfp4_sgl.triton_kernels.plan.batch import PAGE_TOKENS, Batch
from nvfp4_sgl.triton_kernels.plan.resolve import Plan, resolve

from . import Case, Peer, one_after_the_other

RANKS = {"flash": 1024, "pro": 1536}
EPS, PAGE_SIZE = 1e-6, 256
CONTEXT, WINDOW = 65536, 128
REQUESTS = (1, 8, 64, 256)
PREFILL = 8192
SMALLER = (TWO_LAUNCH_MIN_TOKENS // 2, TWO_LAUNCH_MIN_TOKENS)
"""Sizes that one request has, too: the last power of two that takes one launch, and the first that takes two."""
DECODE = {"none close": 0, "all close": 127, "as it comes": None}
"""Position of the new tokens in their window of 128; or one after another."""
OWN_PAGES = 2
"""Pages of a request, over and over: all that a decode step reads of a long one lies in its last two."""


def cases() -> Iterator[Case]:
    for requests in REQUESTS:
        for kind, phase in DECODE.items():
            phases = torch.arange(requests) % 128 if phase is None else torch.full((requests,), phase)
            yield from _layers(_plan(CONTEXT - 256 + phases, torch.ones_like(phases)), f"decode {kind}")
    for tokens in (*SMALLER, PREFILL):
        yield from _layers(_plan(torch.tensor([CONTEXT - tokens]), torch.tensor([tokens])), "prefill")
    starts = torch.arange(64) * 37
    yield from _layers(_plan(starts, torch.full_like(starts, PREFILL // 64)), "prefill of 64")


def _layers(plan: Plan, kind: str) -> Iterator[Case]:
    """The parts of a layer alone, then whole layers."""
    batch = plan.batch
    frequencies = inverse_frequencies(64, 160000.0).cuda()
    workspace = new_workspace(batch.tokens, batch.requests.shape[0], "cuda")

    def run(latents: Latents | None, calls: list[Compression]) -> None:
        prepare_attention(latents, calls, batch, frequencies, workspace=workspace)

    latents = {model: _latents(batch, frequencies, rank) for model, rank in RANKS.items()}
    peers = {model: _latent_peers(mine, batch, frequencies) for model, mine in latents.items()}
    for model, mine in latents.items():
        yield Case(
            f"latents/{model}/{kind}/{batch.tokens}", partial(run, mine, []), _latent_bytes(mine), peers=peers[model]
        )
    layers = {
        "csa": [_compression(plan, 4, 512), _compression(plan, 4, 128)],
        "hca": [_compression(plan, 128, 512)],
    }
    for layer, calls in layers.items():
        size = sum(_bytes(batch, call) for call in calls)
        theirs = compress_peers(calls, plan, frequencies, partial(run, None))
        yield Case(f"compress {layer}/{kind}/{batch.tokens}", partial(run, None, calls), size, peers=theirs)
        for model, mine in latents.items():
            yield Case(
                f"attention_inputs {layer}/{model}/{kind}/{batch.tokens}",
                partial(run, mine, calls),
                size + _latent_bytes(mine),
                peers=one_after_the_other(peers[model], theirs),
            )


def _latents(batch: Batch, frequencies: Tensor, rank: int) -> Latents:
    """Columns of one GEMM, in fp32."""
    tokens = batch.tokens
    q_lora, kv = torch.randn(tokens, rank + 512, device="cuda").split([rank, 512], dim=1)
    return Latents(
        q_lora=q_lora,
        q_norm=torch.ones(rank, device="cuda", dtype=torch.bfloat16),
        q_out=torch.empty(tokens, rank, device="cuda", dtype=torch.bfloat16),
        kv=kv,
        kv_norm=torch.ones(512, device="cuda", dtype=torch.bfloat16),
        eps=EPS,
        cos_sin=rope_cos_sin(batch.positions, frequencies, torch.empty(tokens, 64, device="cuda")),
        slots=torch.randperm(64 * PAGE_SIZE, device="cuda")[:tokens],
        pages=torch.zeros(64, kv_entry.page_bytes(PAGE_SIZE), device="cuda", dtype=torch.uint8),
        page_size=PAGE_SIZE,
    )


def _latent_bytes(latents: Latents) -> int:
    product = latents.q_lora.nbytes + latents.kv.nbytes
    passed = latents.cos_sin.nbytes + latents.slots.nbytes
    normed = 2 * latents.q_lora.numel()
    return product + normed + passed + latents.tokens * kv_entry.ENTRY_BYTES


def _latent_peers(latents: Latents, batch: Batch, frequencies: Tensor) -> dict[str, Peer]:
    """A norm and a store, which read bf16 rows of their own."""
    if latents.q_out is None or not installed("sglang", "sgl_kernel"):
        return {}
    norm = foreign("sgl_kernel", "rmsnorm")
    store = foreign("sglang.kernels.ops.attention.dsv4.norm_rope", "fused_k_norm_rope_flashmla")
    angles = torch.arange(CONTEXT, device="cuda", dtype=torch.float32)[:, None] * frequencies
    table = torch.polar(torch.ones_like(angles), angles)
    rows, keys, slots = latents.q_lora.bfloat16(), latents.kv.bfloat16(), latents.slots.int()
    own, pages = torch.empty_like(latents.q_out), torch.zeros_like(latents.pages)

    def run() -> None:
        norm(rows, latents.q_norm, EPS, own)
        store(keys, latents.kv_norm, EPS, table, batch.positions, slots, pages, PAGE_SIZE)

    return {"sgl_kernel norm, sglang store (nvcc)": compared(run, latents.q_out, own)}


def _plan(starts: Tensor, counts: Tensor) -> Plan:
    requests = len(starts)
    owners = torch.repeat_interleave(torch.arange(requests), counts)
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    positions = starts[owners] + torch.arange(len(owners)) - bounds[owners]
    # A prefill's pages are all its own.
    pages = max(OWN_PAGES, int(counts.max()) // PAGE_TOKENS + 2)
    column, last = torch.arange(CONTEXT), pages * PAGE_TOKENS
    slots = torch.arange(requests)[:, None] * last + column // PAGE_TOKENS % pages * PAGE_TOKENS + column % PAGE_TOKENS
    plan = Plan.allocate(
        positions.cuda(), torch.arange(requests).cuda(), slots.int().cuda(), torch.arange(requests * last).cuda(),
        window=WINDOW, longest=CONTEXT, tokens_each=1 if len(owners) == requests else None,
    )  # fmt: skip
    resolve(plan, (starts + counts).cuda(), counts.cuda())
    return plan


def _compression(plan: Plan, ratio: int, n: int) -> Compression:
    width = 2 * n if ratio == LayerKind.CSA.value else n
    compressor = Compressor(
        ratio,
        torch.randn(ratio, width, device="cuda"),
        torch.ones(n, device="cuda", dtype=torch.bfloat16),
        1e-6,
    )
    product = torch.randn(plan.batch.tokens, 2 * width + 2048, device="cuda")
    pages = plan.full_to_swa.shape[0] // PAGE_TOKENS
    owners = pages if ratio == LayerKind.CSA.value else plan.batch.requests.shape[0]
    page_size = PAGE_TOKENS // ratio
    entry = kv_entry if n == kv_entry.DIM else index_entry
    return Compression(
        compressor,
        product[:, 2048 : 2048 + width],
        product[:, 2048 + width :],
        torch.randn(owners * STATE_RING[ratio], 2 * width, device="cuda"),
        torch.zeros(pages, entry.page_bytes(page_size), device="cuda", dtype=torch.uint8),
        page_size,
        STATE_RING[ratio],
    )


def _bytes(batch: Batch, call: Compression) -> int:
    """New rows, state rows that are kept, history that closing windows need, entries."""
    compressor, ratio = call.compressor, call.compressor.ratio
    starts, bounds = batch.starts.cpu().long(), batch.bounds.cpu().long()
    ends = starts + bounds.diff()
    row = 2 * compressor.width * 4
    if ratio == LayerKind.CSA.value:
        # Of a page its last 8, or the pass's; of history half of each row, up to the beginning of the window before.
        whole = ends // PAGE_TOKENS - starts // PAGE_TOKENS
        kept = torch.minimum(8 * (whole + 1), ends - starts)
        history = (starts % 4 + 4) * (row // 2)
    else:
        kept = torch.minimum(torch.tensor(128), ends - starts)
        history = starts % 128 * row
    windows = ends // ratio - starts // ratio
    entry = kv_entry.ENTRY_BYTES if compressor.size == kv_entry.DIM else index_entry.ENTRY_BYTES
    history = torch.where(windows > 0, history, 0)
    return int((row * (ends - starts) + row * kept + history + entry * windows).sum())
