"""Peers of the hyper-connections in bench_kernels: SGLang's kernels, composed as its DeepSeek-V4 calls them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.families import Peer, relative_error
from benchmarks.peers import compared, foreign, installed
from nvfp4_sgl.triton_kernels.hyper_connection import site as hc

MHC = "sglang.kernels.ops.layernorm.mhc"
POST_FACTOR = 2.0
BLOCK = 64
"""Tile of DeepGEMM's GEMM, in tokens and in columns, from which SGLang derives its number of splits."""


def next_peers(site: hc.Site, output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> dict[str, Peer]:
    """Peers of ``hyper_connection_next``; on copies, as ours works in place."""
    streams = streams.clone()
    ours = hc.SiteState.allocate(streams.shape[0], streams.shape[2], streams.device)

    def peer(run: Callable[[], tuple[Tensor, Tensor]]) -> Peer:
        def error() -> float:
            """Relative error of the streams or of the sublayer's input, whichever is larger."""
            ours.post.copy_(post)
            ours.comb.copy_(comb)
            mixed = hc.hyper_connection_next(site, output, streams, ours, out=torch.empty_like(streams))
            their_streams, their_x = run()
            return max(relative_error(their_streams, mixed), relative_error(their_x, ours.x))

        return Peer(run, error)

    peers = {}
    if installed("sglang", "tilelang"):
        fused, parameters = foreign(MHC, "mhc_fused_post_pre"), _parameters(site)

        def tilelang() -> tuple[Tensor, Tensor]:
            mixed, _, _, x = _alone(fused, output, streams, post, comb, **parameters)
            return mixed, x

        peers["sglang tilelang"] = peer(tilelang)
    if installed("sglang", "sgl_kernel"):
        mix, fn = foreign("sglang.kernels.ops.layernorm.mhc_post_split_h", "mhc_post_split_h"), _whole_fn(site)

        def triton() -> tuple[Tensor, Tensor]:
            mixed = mix(output, streams, post, comb)
            return mixed, _triton_pre(site, fn, mixed)

        peers["sglang triton"] = peer(triton)
    return peers


def pre_peers(site: hc.Site, streams: Tensor, state: hc.SiteState) -> dict[str, Peer]:
    """Peers of ``hyper_connection_pre``, and DeepGEMM's GEMM with the squares, which is its larger part."""
    peers = {}
    if installed("sglang", "tilelang"):
        pre, parameters = foreign(MHC, "mhc_pre"), _parameters(site)
        peers["sglang tilelang"] = compared(lambda: _alone(pre, streams, **parameters)[2], state.x)
    if installed("sglang", "sgl_kernel"):
        peers["sglang triton"] = compared(partial(_triton_pre, site, _whole_fn(site), streams), state.x)
    if installed("deep_gemm"):
        fn = _whole_fn(site)
        tokens, (rows, width) = streams.shape[0], fn.shape
        processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        splits = max(1, min(processors // -(-tokens // BLOCK), -(-width // BLOCK) // 4))
        parts = torch.empty(splits, tokens, rows, device="cuda")
        squares = torch.empty(splits, tokens, device="cuda")
        product = foreign("deep_gemm", "tf32_hc_prenorm_gemm")
        flat = streams.view(tokens, width)
        peers["deep_gemm product alone (nvcc)"] = Peer(
            partial(product, flat, fn, parts, squares, num_splits=splits),
            lambda: relative_error(parts.sum(0), flat.float() @ fn.T),
            part=True,
        )
    return peers


def head_peers(site: hc.Site, streams: Tensor, state: hc.SiteState) -> dict[str, Peer]:
    """Peers of ``hyper_connection_pre`` with the final collapse."""
    if not installed("sglang", "sgl_kernel"):
        return {}
    collapse, fn = foreign("sglang.kernels.ops.layernorm.mhc_head", "fused_hc_head"), _whole_fn(site)

    def run() -> Tensor:
        x = collapse(streams, fn, site.scale, site.base, norm_eps=site.norm_eps, hc_eps=site.hc_eps)
        return _norm(site, x)

    return {"sglang triton, sgl_kernel norm": compared(run, state.x)}


def post_peers(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor, mixed: Tensor) -> dict[str, Peer]:
    """Peers of ``hyper_connection_post``, which leaves its result in ``mixed``."""
    peers = {}
    if installed("sglang"):
        mix = foreign("sglang.kernels.ops.layernorm.mhc_post_split_h", "mhc_post_split_h")
        peers["sglang triton"] = compared(partial(mix, output, streams, post, comb), mixed)
    if installed("sglang", "tilelang"):
        own, d = torch.empty_like(streams), streams.shape[2]
        blocks = d // 1024 if len(streams) <= 256 else 1
        kernel = foreign(MHC, "mhc_post_tilelang")
        run = partial(kernel, comb, streams, post, output, own, hc.STREAMS, d, num_h_blocks=blocks)
        peers["sglang tilelang"] = compared(run, mixed, own)
    return peers


def _parameters(site: hc.Site) -> dict[str, Any]:
    return {
        "fn": _whole_fn(site),
        "hc_scale": site.scale,
        "hc_base": site.base,
        "rms_eps": site.norm_eps,
        "hc_pre_eps": site.hc_eps,
        "hc_sinkhorn_eps": site.hc_eps,
        "hc_post_mult_value": POST_FACTOR,
        "sinkhorn_repeat": site.iterations,
        "norm_weight": site.norm,
        "norm_eps": site.norm_eps,
    }


def _alone(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that needs the server's group of ranks, with a group of one."""
    context = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    with context.override(tp_group=None):
        return function(*args, **kwargs)


_STATS, _COMBINE = foreign(MHC, "hc_mix_stats_sinkhorn"), foreign(MHC, "mhc_combine")
_RMS_NORM = foreign("sgl_kernel", "rmsnorm")


def _whole_fn(site: hc.Site) -> Tensor:
    """fp32 [rows, 4 * d]; exact."""
    return site.fn.float().sum(0)


def _triton_pre(site: hc.Site, fn: Tensor, streams: Tensor) -> Tensor:
    flat = streams.flatten(1)
    pre, _, _ = _STATS(flat, fn, site.scale, site.base, hc.STREAMS, site.iterations, site.norm_eps, site.hc_eps)
    return _norm(site, _COMBINE(flat, pre, hc.STREAMS, flat.dtype))


def _norm(site: hc.Site, x: Tensor) -> Tensor:
    normed: Tensor = _RMS_NORM(x, site.norm, site.norm_eps)
    return normed
