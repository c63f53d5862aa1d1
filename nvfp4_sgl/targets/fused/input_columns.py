"""The first GEMMs of an attention layer: the merged ones; and the bf16 matrix of a CSA layer's index weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from nvfp4_sgl.model.contract import Columns, Context, Form, Operand, Unmultiplied
from nvfp4_sgl.targets.fused.gemm_bf16 import dequantized
from nvfp4_sgl.targets.reference.projections import columns_of
from nvfp4_sgl.weights.matrix import load_matrix
from nvfp4_sgl.weights.source import Shard, frozen


class MergedProjection(Protocol):
    """GEMMs of matrices that read the same activation."""

    @property
    def takes(self) -> Form: ...

    def product(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The columns of each shard, [T, rows] in ``dtype``."""

    def __call__(self, x: Operand) -> list[Tensor]:
        """The columns of each shard in bf16."""


class InputColumns(nn.Module):
    """The columns of ``projection``; the index weights are left to what prepares attention."""

    def __init__(self, context: Context, projection: MergedProjection, index_weights: Shard | None):
        super().__init__()
        self.projection = projection
        self.index_weights: nn.Parameter | None = None
        if index_weights is not None:
            self.index_weights = frozen(dequantized(load_matrix(context.source, [index_weights]), context.device))

    @property
    def takes(self) -> Form:
        return self.projection.takes if self.index_weights is None else self.projection.takes | Form.VALUES

    def forward(self, x: Operand) -> Columns:
        """The layer's columns in fp32."""
        columns = columns_of(self.projection.product(x, torch.float32), indexed=False)
        if self.index_weights is None:
            return columns
        return replace(columns, index_weights=Unmultiplied(self.index_weights.data))
