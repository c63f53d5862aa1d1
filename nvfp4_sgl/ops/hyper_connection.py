"""Manifold-constrained hyper-connections (mHC): four residual streams around every sublayer (specification §2).

The mixing matrix of the streams is pushed towards the doubly stochastic matrices by Sinkhorn's algorithm
(arXiv 2512.24880). Everything here is fp32; streams are stored in the model dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def expand_streams(embedded: Tensor, streams: int) -> Tensor:
    """Copy the embedding [T, d] to every residual stream: [T, streams, d], same dtype, no scaling."""
    return embedded.unsqueeze(1).expand(-1, streams, -1).contiguous()


def _stream_mix(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    """``fn @ x / rms(x)`` over the flattened streams: fp32 [T, fn rows]."""
    flat = streams.flatten(1).float()
    inverse_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    return (flat @ fn.t()) * inverse_rms


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Sinkhorn normalisation as DeepSeek-V4 does it.

    Row softmax plus ``eps``, one column normalisation, then ``iterations - 1`` times rows and columns; each
    division is by ``sum + eps``. Ends on columns: they sum to 1, rows only nearly.

    Args:
        logits: fp32 [T, n, n].
        iterations: 20 in the released models.

    Returns:
        fp32 [T, n, n].
    """
    comb = torch.softmax(logits, dim=-1) + eps
    # sum + eps as one GEMM with ones: half the time of two calls on matrices this small.
    ones = comb.new_ones(comb.shape[0], comb.shape[-1], 1)
    ones_t, eps_1 = ones.transpose(1, 2), comb.new_full((1, 1, 1), eps)
    comb = comb / torch.baddbmm(eps_1, ones_t, comb)
    for _ in range(iterations - 1):
        comb = comb / torch.baddbmm(eps_1, comb, ones)
        comb = comb / torch.baddbmm(eps_1, ones_t, comb)
    return comb


def hyper_connection_pre(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    iterations: int,
    hc_eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse the streams into a sublayer's input and compute how its output is mixed back.

    Args:
        streams: [T, n, d], model dtype (n = 4).
        fn: fp32 [(2 + n) * n, n * d], stream-major columns; rows are pre (n), post (n), comb (n * n).
        base: fp32 [(2 + n) * n].
        scale: fp32 [3], for pre, post and comb.
        iterations: Sinkhorn iterations.
        hc_eps: added to ``pre``, to the softmax and to Sinkhorn's sums.
        norm_eps: added to the mean square of all n * d values.

    Returns:
        ``collapsed`` [T, d] in the model dtype (``sum_k pre_k x_k`` in fp32, one rounding), ``post`` fp32
        [T, n], ``comb`` fp32 [T, n, n].
    """
    n = streams.shape[1]
    mix = _stream_mix(streams, fn, norm_eps)
    pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + hc_eps
    post = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = sinkhorn((mix[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), iterations, hc_eps)
    collapsed = torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1)
    return collapsed.to(streams.dtype), post, comb


def hyper_connection_post(output: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Mix a sublayer's output into the streams: ``x'_k = post_k h + sum_j comb[j, k] x_j``.

    ``comb`` acts transposed: its row index is the stream that is read.

    Args:
        output: [T, d], the sublayer's output.
        streams: [T, n, d] as they were before the sublayer.
        post: fp32 [T, n].
        comb: fp32 [T, n, n].

    Returns:
        [T, n, d] in ``streams.dtype``; fp32 throughout, one rounding.
    """
    mixed = torch.baddbmm(post.unsqueeze(2) * output.float().unsqueeze(1), comb.transpose(1, 2), streams.float())
    return mixed.to(streams.dtype)


def hyper_connection_head(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, hc_eps: float, norm_eps: float
) -> Tensor:
    """Collapse the streams once more, before the final norm.

    Args:
        streams: [T, n, d]. fn: fp32 [n, n * d]. base: fp32 [n]. scale: fp32 [1].

    Returns:
        [T, d] in ``streams.dtype``.
    """
    pre = torch.sigmoid(_stream_mix(streams, fn, norm_eps) * scale + base) + hc_eps
    return torch.bmm(pre.unsqueeze(1), streams.float()).squeeze(1).to(streams.dtype)
