"""Embedding to streams and RMSNorm, at the shapes of Flash and Pro. Peers: torch; SGLang's Triton and AOT kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.peers import compared, foreign, installed
from nvfp4_sgl.triton_kernels.hyper_connection import streams

from . import Case, Peer

WIDTHS = {"flash": 4096, "pro": 7168}
TOKENS = (1, 8, 64, 256, 8192)
STREAMS = 4


def cases() -> Iterator[Case]:
    for model, width in WIDTHS.items():
        for tokens in TOKENS:
            x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
            weight, out = torch.randn_like(x[0]), torch.empty_like(x)
            copied = x.new_empty(tokens, STREAMS, width)
            yield Case(
                f"expand_streams/{model}/{tokens}x{width}",
                partial(streams.expand_streams, x, STREAMS, out=copied),
                bytes=x.nbytes + copied.nbytes,
                peers=_expand_peers(x, copied),
            )
            yield Case(
                f"rms_norm/{model}/{tokens}x{width}",
                partial(streams.rms_norm, x, weight, 1e-6, out=out),
                bytes=2 * x.nbytes,
                peers=_norm_peers(x, weight, out),
            )


def _expand_peers(x: torch.Tensor, copied: torch.Tensor) -> dict[str, Peer]:
    own = torch.empty_like(copied)
    peers = {"torch": compared(partial(own.copy_, x.unsqueeze(1).expand_as(own)), copied, own)}
    if installed("sglang"):
        peers["sglang hc_broadcast"] = compared(
            partial(foreign("sglang.kernels.ops.layernorm.mhc", "hc_broadcast"), x, STREAMS), copied
        )
    return peers


def _norm_peers(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> dict[str, Peer]:
    peers = {"torch": compared(partial(F.rms_norm, x, x.shape[-1:], weight, 1e-6), out)}
    if installed("sgl_kernel"):
        own = torch.empty_like(out)
        peers["sgl_kernel"] = compared(partial(foreign("sgl_kernel", "rmsnorm"), x, weight, 1e-6, own), out, own)
    return peers
