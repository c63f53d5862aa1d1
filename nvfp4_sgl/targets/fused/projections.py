"""Matrices that read the same activation, merged as the target's rule says; each merged part is a GEMM of a backend."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from nvfp4_sgl.model.contract import Activation, Columns, Context, Form, Unmultiplied
from nvfp4_sgl.targets.fused.activations import in_form
from nvfp4_sgl.targets.fused.gemm_backend import Backends, Gemm, SendingGemm
from nvfp4_sgl.targets.fused.gemm_bf16 import dequantized
from nvfp4_sgl.targets.reference.projections import columns_of
from nvfp4_sgl.weights.matrix import load_matrix
from nvfp4_sgl.weights.source import Shard, frozen


class Projection(nn.Module):
    """Matrices that read the same activation: a GEMM for each part that the target's rule makes of them."""

    def __init__(self, backends: Backends, context: Context, shards: Sequence[Shard]):
        super().__init__()
        parts = backends.target.merge.split(backends.kinds(context, shards))
        self._members = [list(members) for _, members in parts]
        gemms: list[Gemm] = [
            backends.dense[kind].load(context, [shards[index] for index in members]) for kind, members in parts
        ]
        self._gemms, self.gemms = gemms, nn.ModuleList(cast("list[nn.Module]", gemms))
        self.takes = functools.reduce(operator.or_, (gemm.takes for gemm in gemms))

    def multiply(self, x: Activation, dtype: torch.dtype, first: int | None = None) -> list[Tensor]:
        """The columns of each shard, or of the ``first`` so many; slices [T, rows] in ``dtype``, bf16 or fp32."""
        columns: dict[int, Tensor] = {}
        for gemm, members in zip(self._gemms, self._members, strict=True):
            wanted = members if first is None else [index for index in members if index < first]
            if wanted:
                sizes = gemm.sizes[: len(wanted)]
                result = gemm(x, dtype, None if wanted == members else sum(sizes))
                columns |= dict(zip(wanted, result.split(sizes, dim=1), strict=True))
        return [columns[index] for index in sorted(columns)]

    def forward(self, x: Activation, first: int | None = None) -> list[Tensor]:
        """The columns of each shard, or of the ``first`` so many, in bf16."""
        return self.multiply(x, torch.bfloat16, first)

    @property
    def send(self) -> Callable[[Activation, Sequence[Tensor]], Tensor] | None:
        """The GEMM of a single shard that stores in several tensors, if its backend has one."""
        (gemm,) = self._gemms
        return gemm.send if isinstance(gemm, SendingGemm) else None


class InputProjection(nn.Module):
    """The first GEMMs of an attention layer.

    The bf16 matrix of a CSA layer's index weights is left to what prepares attention, unless the target merges all and
    the others are bf16, too.
    """

    def __init__(self, backends: Backends, context: Context, shards: Sequence[Shard], index_weights: Shard | None):
        super().__init__()
        rule, kinds = backends.target.merge, backends.kinds(context, shards)
        self._merges = index_weights is not None and not rule.by_kind and rule.split(kinds)[0][0] == "bf16"
        self.index_weights: nn.Parameter | None = None
        if index_weights is not None and self._merges:
            shards = [*shards, index_weights]
        elif index_weights is not None:
            self.index_weights = frozen(dequantized(load_matrix(context.source, [index_weights]), context.device))
        self.projection = Projection(backends, context, shards)

    @property
    def takes(self) -> Form:
        return self.projection.takes if self.index_weights is None else self.projection.takes | Form.VALUES

    def forward(self, x: Activation) -> Columns:
        """The layer's columns in fp32."""
        columns = columns_of(self.projection.multiply(x, torch.float32), indexed=self._merges)
        if self.index_weights is None:
            return columns
        return replace(columns, index_weights=Unmultiplied(self.index_weights.data))


class GroupedProjection(nn.Module):
    """The block-diagonal GEMM of the attention output (specification §3.4)."""

    def __init__(self, backends: Backends, context: Context, shard: Shard, groups: int):
        super().__init__()
        (kind,) = backends.kinds(context, [shard])
        self.gemm: Gemm = backends.dense[kind].load(context, [shard], groups)
        self.takes = self.gemm.takes

    def forward(self, x: Activation, form: Form) -> Activation:
        """The result [T, G * N] in ``form``; NVFP4 takes a launch of its own, because a row's maximum spans CTAs."""
        result = self.gemm(x, torch.bfloat16)
        return in_form(result.flatten(1), form)
