"""The w8a16 GEMMs as a PyTorch custom operator, ``torch.ops.nvfp4_sgl``: plain tensors in, results into a given tensor.

Every call is checked from the tensors' metadata before anything is launched; the same checks run on fake tensors.
Nothing is allocated, copied or synchronised, so calls may be captured in CUDA graphs (each kernel must have run once
before). Callers use :mod:`.operations`.
"""

from __future__ import annotations

from torch import Tensor

from nvfp4_sgl.formats.checks import require_same_device

from .. import launcher, plan
from ..common.shape import Output
from ..sm90.call import Call
from ..sm90.fp8_layout import FP8_TILE_BYTES
from ..w4a4.custom_ops import check_alpha, register
from ..w4a16.custom_ops import ARCHITECTURES, WHAT, check_dense, launch

OP = "w8a16_product"


def _check_product(tokens: Tensor, weights: Tensor, ones: Tensor, out: Tensor) -> Output:
    require_same_device("out", out, tokens=tokens, weights=weights, ones=ones)
    output = check_dense(OP, tokens, weights, out, FP8_TILE_BYTES)
    check_alpha(OP, ones, (1,), "[1]")
    return output


def _product(tokens: Tensor, weights: Tensor, ones: Tensor, out: Tensor) -> None:
    output = _check_product(tokens, weights, ones, out)
    architecture, clusters = launcher.target(out.device, ARCHITECTURES, WHAT)
    rows, k, features, groups = max(tokens.shape[0], 1), tokens.shape[-1], out.shape[-1], weights.shape[0]
    shape = plan.plan_w4a16(features, k, rows, groups, output, clusters, "fp8")
    alpha = ones.expand(groups, features)
    launch(OP, architecture, Call(shape=shape, weights=weights, tokens=tokens, out=out, alpha=alpha))


register("w8a16_product(Tensor tokens, Tensor weights, Tensor ones, Tensor(a!) out)", _product, _check_product)
