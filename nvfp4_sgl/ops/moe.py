"""Expert routing and the expert network (specification §6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_sgl.formats.nvfp4 import swiglu_row_scale
from nvfp4_sgl.ops.linear import PreparedWeight, activation_operand, apply_scales
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.ops.swiglu import clamped_swiglu


def route_weights(scores: Tensor, experts: Tensor, scaling: float) -> Tensor:
    """Weights of the chosen experts: each score over the sum of the chosen scores, times ``scaling``.

    Args:
        scores: fp32 [T, E]. experts: int64 [T, topk], the chosen ones.

    Returns:
        fp32 [T, topk]. The sum has 1e-20 added, so that scores of 0 give 0.
    """
    chosen = scores.gather(1, experts)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


def router_scores(x: Tensor, gate: Tensor) -> Tensor:
    """``sqrt(softplus(x @ gate^T))``: fp32 [T, E] from x [T, d] and gate [E, d], fp32 accumulation."""
    return F.softplus(x.float() @ gate.float().t()).sqrt()


def route_topk(x: Tensor, gate: Tensor, bias: Tensor, topk: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Choose experts by ``score + bias``; weigh them by their scores alone.

    Args:
        x: [T, d]. gate: [E, d]. bias: fp32 [E], the correction bias.
        topk: experts per token. scaling: ``routed_scaling_factor``.

    Returns:
        ``experts`` int64 [T, topk] (order unspecified) and ``weights`` fp32 [T, topk], which sum to ``scaling``.
    """
    scores = router_scores(x, gate)
    experts = (scores + bias).topk(topk, dim=-1, sorted=False).indices
    return experts, route_weights(scores, experts, scaling)


def route_hash(x: Tensor, gate: Tensor, table: Tensor, token_ids: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Choose experts by the token's id; weigh them by their scores, as :func:`route_topk` does.

    Args:
        x: [T, d]. gate: [E, d]. table: int [vocab, topk]. token_ids: int [T].
    """
    experts = table[token_ids].long()
    return experts, route_weights(router_scores(x, gate), experts, scaling)


def expert_mlp(
    x: Tensor, w13: PreparedWeight, w2: PreparedWeight, limit: float, mode: ActivationMode, dtype: torch.dtype
) -> Tensor:
    """One feed-forward network per batch entry: ``W2 swiglu(W1 x, W3 x)``.

    Args:
        x: [E, C, d] with values [E, d, 2I] (gate columns first) and [E, I, d], or the same without E.
        limit: the SwiGLU clamp.
        dtype: model dtype; in ``w4a16`` mode the SwiGLU output is rounded to it.

    Returns:
        fp32, shape of ``x``.

    Rounding: gate and up stay fp32 from accumulator to SwiGLU. In ``w4a4`` mode its output is quantised from
    fp32 with the constant row scale ``limit**2 / (6 * 448)``, which the clamp makes impossible to exceed.
    """
    values, row_scale = activation_operand(x, w13, mode)
    gate, up = apply_scales(values @ w13.values, row_scale, _per_row(w13)).chunk(2, dim=-1)
    hidden = clamped_swiglu(gate, up, limit)
    if mode is ActivationMode.W4A16 or not w2.is_nvfp4:
        hidden = hidden.to(dtype)
    values, row_scale = activation_operand(hidden, w2, mode, swiglu_row_scale(limit))
    return apply_scales(values @ w2.values, row_scale, _per_row(w2))


def _per_row(weight: PreparedWeight) -> Tensor | None:
    """alpha [..., N] shaped to multiply [..., C, N]."""
    return None if weight.alpha is None else weight.alpha.unsqueeze(-2)


def routed_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w13: PreparedWeight,
    w2: PreparedWeight,
    limit: float,
    mode: ActivationMode,
) -> Tensor:
    """Weighted sum of each token's experts.

    Args:
        x: [T, d]. experts: int64 [T, k]. weights: fp32 [T, k].
        w13: values [E, d, 2I], gate columns first. w2: values [E, I, d].

    Returns:
        fp32 [T, d]; routing weights are applied after W2, the sum is fp32.

    Tokens are sorted by expert and padded to the fullest one, so that the whole layer is two batched GEMMs.
    """
    tokens, k = experts.shape
    count = w13.values.shape[0]
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    sorted_experts = flat[order]
    sizes = torch.bincount(flat, minlength=count)
    within = torch.arange(flat.numel()) - (sizes.cumsum(0) - sizes)[sorted_experts]
    padded = x.new_zeros(count, int(sizes.max()), x.shape[1])
    padded[sorted_experts, within] = x[order // k]
    result = expert_mlp(padded, w13, w2, limit, mode, x.dtype)
    per_pair = result.new_empty(tokens * k, result.shape[-1])
    per_pair[order] = result[sorted_experts, within]
    return torch.bmm(weights.unsqueeze(1), per_pair.view(tokens, k, -1)).squeeze(1)
