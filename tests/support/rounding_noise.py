"""How far rounding activations takes log-probabilities from fp32 ones, and whether what was found is no farther.

Both are root mean square distances of a position's log-probabilities, [vocabulary], to those of fp32 activations. The
yardstick is the reference with rounded activations, in several runs of which each rounds in other places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

QUANTILES = (0.5, 0.9)
"""The median moves with every position's rounding, the other with choices, of experts or entries, that flip."""


def nudged(weight: Tensor, seed: int) -> Tensor:
    """One in a hundred bf16 numbers moved to a neighbour: roundings behind it fall differently, the error stays."""
    chance = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(weight.device)
    factor = torch.where(chance < 0.005, 1 + 2.0**-8, torch.where(chance > 0.995, 1 - 2.0**-8, 1.0))
    return (weight.float() * factor).to(weight.dtype)


def distances(found: Tensor, expected: Tensor) -> Tensor:
    """Root mean square distance of the log-probabilities [T, vocabulary] of each position, [T]."""
    return (found - expected).square().mean(-1).sqrt()


def excess(ours: Tensor, rounded: Sequence[Tensor]) -> tuple[float, float]:
    """Our median distance by the median of the yardstick's medians; our 90 % quantile by the yardstick's largest.

    Args:
        ours: [T], of all positions. rounded: the same of the reference, one a run.

    Returns:
        Infinity where a distance of ours is not finite.
    """
    if not bool(torch.isfinite(ours).all()):
        return torch.inf, torch.inf
    quantiles = torch.tensor(QUANTILES)
    found = ours.cpu().quantile(quantiles)
    theirs = torch.stack([each.cpu().quantile(quantiles) for each in rounded])
    print("distance to fp32 activations, median and 90 %:", found, "the reference's:", theirs)
    return float(found[0] / theirs[:, 0].median()), float(found[1] / theirs[:, 1].max())
