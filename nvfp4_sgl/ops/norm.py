"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Args:
        x: [..., n], any floating dtype; read as fp32.
        weight: [n], read as fp32, or ``None`` for the unweighted form.
        eps: added to the mean square.
        out_dtype: dtype of the result, ``x.dtype`` unless given.

    Rounding: statistics and product in fp32, one rounding to the output dtype (DeepSeek's order; transformers
    rounds before the weight is applied, specification §2).
    """
    scale = None if weight is None else weight.float()
    return F.rms_norm(x.float(), x.shape[-1:], scale, eps).to(out_dtype or x.dtype)
