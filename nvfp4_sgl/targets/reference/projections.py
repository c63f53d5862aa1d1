"""GEMMs on the CPU, from weights decoded to fp32 at load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.checkpoint.decoders import Matrix
from nvfp4_sgl.checkpoint.storage import Storage
from nvfp4_sgl.model.contract import Activation, Columns, Context, Form
from nvfp4_sgl.ops.linear import ActivationMode, PreparedWeight, grouped_linear, linear
from nvfp4_sgl.weights.matrix import concatenate, load_matrix
from nvfp4_sgl.weights.source import Shard


def working_copy(matrix: Matrix, storage: Storage | None = None) -> PreparedWeight:
    """The fp32 copy that the references multiply with; global scales stay apart as per-row alphas.

    Args:
        storage: of the matrix, by which ``w4a4`` mode knows FP8 with UE8M0 scales.
    """
    if isinstance(matrix, Tensor):
        values = matrix.float().transpose(-1, -2).contiguous()
        return PreparedWeight(values, None, storage is not None and storage.is_mxfp8)
    alpha = matrix.global_scale_of_rows().clone(memory_format=torch.contiguous_format)
    return PreparedWeight(matrix.unscaled().transpose(-1, -2).contiguous(), alpha)


class ReferenceProjection(nn.Module):
    """Matrices that read one activation; those whose activation is quantised alike are merged."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard]):
        super().__init__()
        self._mode = context.mode
        storages = [context.source.storage(shard.stem) for shard in shards]
        alike: dict[tuple[bool, bool], list[int]] = {}
        for index, storage in enumerate(storages):
            is_mxfp8 = storage.is_mxfp8 and self._mode is ActivationMode.W4A4
            alike.setdefault((storage.is_nvfp4, is_mxfp8), []).append(index)
        self._members = list(alike.values())
        self._sizes = [0] * len(shards)
        self._weights: list[PreparedWeight] = []
        for members in self._members:
            loaded = [load_matrix(context.source, [shards[i]]) for i in members]
            for index, part in zip(members, loaded, strict=True):
                self._sizes[index] = part.shape[0]
            merged = concatenate(loaded, [shards[i].stem for i in members])
            self._weights.append(working_copy(merged, storages[members[0]]))

    def forward(self, x: Activation, first: int | None = None) -> list[Tensor]:
        """fp32 [T, rows] for each shard, in the order given; the consumer rounds. All are multiplied."""
        values = x.require_values()
        results: list[Tensor] = [values] * len(self._sizes)
        for members, weight in zip(self._members, self._weights, strict=True):
            product = linear(values, weight, self._mode)
            for index, part in zip(members, product.split([self._sizes[i] for i in members], dim=-1), strict=True):
                results[index] = part
        return results[:first]


class ReferenceInputProjection(nn.Module):
    """The first GEMMs of an attention layer, index weights among them."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard], index_weights: Shard | None):
        super().__init__()
        self._is_indexed = index_weights is not None
        self.projection = ReferenceProjection(context, [*shards, *([index_weights] if index_weights else [])])

    def forward(self, x: Activation) -> Columns:
        """fp32 columns."""
        return columns_of(self.projection(x), indexed=self._is_indexed)


def columns_of(parts: Sequence[Tensor], *, indexed: bool) -> Columns:
    """Parts in the order of ``weights.layout``; ``indexed``: the last one is the index weights."""
    q_lora, kv, *rest = parts
    weights = rest.pop() if indexed else None
    pairs = [(rest[n], rest[n + 1]) for n in range(0, len(rest), 2)]
    return Columns(q_lora, kv, pairs[0] if pairs else None, pairs[1] if len(pairs) > 1 else None, index_weights=weights)


class ReferenceGroupedProjection(nn.Module):
    """The block-diagonal GEMM; in ``w4a4`` mode each (token, group) is a row with a scale of its own."""

    takes = Form.VALUES

    def __init__(self, context: Context, shard: Shard, groups: int):
        super().__init__()
        self._mode = context.mode
        matrix = load_matrix(context.source, [shard], groups=groups)
        self._weight = working_copy(matrix, context.source.storage(shard.stem))

    def forward(self, x: Activation, form: Form) -> Activation:
        """[T, G * N], rounded to the dtype of ``x``."""
        values = x.require_values()
        return Activation(grouped_linear(values, self._weight, self._mode).to(values.dtype).flatten(1))
