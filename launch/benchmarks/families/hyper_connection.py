"""Hyper-connections between two sublayers, at the shapes of Flash and Pro.

Peers (``mhc_peers``): SGLang's TileLang kernels, which its server runs; its Triton kernels for the same steps;
DeepGEMM's GEMM alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.peers.mhc import head_peers, next_peers, post_peers, pre_peers
from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.triton_kernels.hyper_connection import site as hc

from . import Case, Peer

WIDTHS = {"flash": 4096, "pro": 7168}
TOKENS = (1, 8, 64, 256, 8192)
EPS = 1e-6


def _site(d: int, rows: int) -> hc.Site:
    return hc.Site(
        fn=hc.split_fn(torch.randn(rows, 4 * d, device="cuda") * (4 * d) ** -0.5),
        base=torch.randn(rows, device="cuda"),
        scale=torch.rand(3 if rows == hc.SITE_ROWS else 1, device="cuda"),
        hc_eps=EPS,
        norm_eps=EPS,
        norm=torch.ones(d, device="cuda", dtype=torch.bfloat16),
        iterations=20,
    )


def cases() -> Iterator[Case]:
    """The copy that is the peer moves as many bytes as the op's floor, without ``fn``."""
    for model, d in WIDTHS.items():
        site, head = _site(d, hc.SITE_ROWS), _site(d, hc.STREAMS)
        for tokens in TOKENS:
            streams = torch.randn(tokens, 4, d, device="cuda", dtype=torch.bfloat16)
            output = torch.randn_like(streams[:, 0])
            state = hc.SiteState.allocate(tokens, d, "cuda")
            hc.hyper_connection_pre(site, streams, state)
            post, comb = state.post.clone(), state.comb.clone()
            moved = 2 * streams.nbytes + 2 * output.nbytes
            source = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
            shape = f"{model}/{tokens}x{d}"
            yield Case(
                f"hyper_connection_next/{shape}",
                partial(hc.hyper_connection_next, site, output, streams, state),
                bytes=moved + site.fn.nbytes,
                flops=2 * site.fn[0].numel() * tokens,
                peers={
                    "copy": Peer(partial(torch.empty_like(source).copy_, source), part=True),
                    **next_peers(site, output, streams, post, comb),
                },
            )
            quantized = Rows.allocate(tokens, d, 128, "cuda")
            yield Case(
                f"hyper_connection_next, quantised/{shape}",
                partial(hc.hyper_connection_next, site, output, streams, replace(state, quantized=quantized)),
                bytes=moved + site.fn.nbytes + output.nbytes * 9 // 32,
                flops=2 * site.fn[0].numel() * tokens,
            )
            yield Case(
                f"hyper_connection_pre/{shape}",
                partial(hc.hyper_connection_pre, site, streams, state),
                bytes=streams.nbytes + output.nbytes + site.fn.nbytes,
                flops=2 * site.fn[0].numel() * tokens,
                peers=pre_peers(site, streams, state),
            )
            yield Case(
                f"hyper_connection_head/{shape}",
                partial(hc.hyper_connection_pre, head, streams, state),
                bytes=streams.nbytes + output.nbytes + head.fn.nbytes,
                flops=2 * head.fn[0].numel() * tokens,
                peers=head_peers(head, streams, state),
            )
            mixed = torch.empty_like(streams)
            yield Case(
                f"hyper_connection_post/{shape}",
                partial(hc.hyper_connection_post, output, streams, post, comb, out=mixed),
                bytes=2 * streams.nbytes + output.nbytes,
                peers=post_peers(output, streams, post, comb, mixed),
            )
