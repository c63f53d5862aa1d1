"""Matrices that read the same activation, merged with those of their kind where a target has a GEMM for each kind."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from nvfp4_sgl.model.contract import Context, Operand
from nvfp4_sgl.targets.fused.input_columns import MergedProjection
from nvfp4_sgl.targets.target import SM100
from nvfp4_sgl.weights.gemms import BY_KIND, Operands
from nvfp4_sgl.weights.source import Shard

Projections = Mapping[Operands, Callable[[Context, Sequence[Shard]], MergedProjection]]
"""A target's GEMMs of matrices that are all of one kind."""


def operands_of(context: Context, shard: Shard) -> Operands:
    """What the GEMM of a matrix multiplies."""
    return SM100.operands_of(context.source.storage(shard.stem))


def merged(context: Context, shards: Sequence[Shard], projections: Projections) -> MergedProjection:
    """A GEMM for each kind that there is."""
    kinds = {operands_of(context, shard) for shard in shards}
    if len(kinds) == 1:
        return projections[kinds.pop()](context, shards)
    return MixedProjection(context, shards, projections)


class MixedProjection(nn.Module):
    """Matrices of several kinds that read the same activation: a GEMM for each kind."""

    def __init__(self, context: Context, shards: Sequence[Shard], projections: Projections):
        super().__init__()
        parts = BY_KIND.split([operands_of(context, shard) for shard in shards])
        self._members, self._count = [members for _, members in parts], len(shards)
        self._parts = [projections[kind](context, [shards[i] for i in members]) for kind, members in parts]
        self.parts = nn.ModuleList(cast("list[nn.Module]", self._parts))
        self.takes = functools.reduce(operator.or_, (part.takes for part in self._parts))

    def product(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The columns of each shard, slices [T, rows] in ``dtype``."""
        found: dict[int, Tensor] = {}
        for members, part in zip(self._members, self._parts, strict=True):
            found.update(zip(members, part.product(x, dtype), strict=True))
        return tuple(found[index] for index in range(self._count))

    def forward(self, x: Operand) -> list[Tensor]:
        """The columns of each shard in bf16."""
        return list(self.product(x, torch.bfloat16))
