"""The operator of the w8a16 GEMMs (:mod:`..operators`). Callers use :mod:`.operations`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .. import operators, plan
from ..common.shape import Output
from ..launcher import Target
from ..operators import Operator, Room, check_alpha
from ..sm90.call import Call
from ..sm90.fp8_layout import FP8_TILE_BYTES
from ..w4a16.custom_ops import ACTIVATIONS, ARCHITECTURES, check_dense


@dataclass(frozen=True, kw_only=True)
class Operands(operators.Operands):
    """Arguments of this operator, weights as :class:`.operand.Fp8TiledWeights` has them."""

    ones: Tensor


def _check_gemm(op: str, x: Operands) -> Output:
    output = check_dense(op, x, FP8_TILE_BYTES)
    check_alpha(op, x.ones, (1,), "[1]")
    return output


def _gemm(x: Operands, output: Output, target: Target) -> Call:
    rows, k, features, groups = max(x.tokens.shape[0], 1), x.tokens.shape[-1], x.out.shape[-1], x.weights.shape[0]
    shape = plan.plan_w4a16(features, k, rows, groups, output, target.clusters, "fp8", pin=target.pin)
    return Call(shape=shape, weights=x.weights, tokens=x.tokens, out=x.out, alpha=x.ones.expand(groups, features))


Room(Operands, ARCHITECTURES, ACTIVATIONS).register(
    Operator("w8a16_product(Tensor tokens, Tensor weights, Tensor ones, Tensor(a!) out)", _check_gemm, _gemm)
)
