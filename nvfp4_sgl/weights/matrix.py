"""Matrices as a rank takes them from a checkpoint: merged by rows, stacked by experts, in the values that it holds.

What arrives as NVFP4 stays packed, a :class:`NvFp4Tensor`; others are plain tensors
(:mod:`nvfp4_sgl.checkpoint.decoders` says which).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_sgl.checkpoint.decoders import Matrix
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.formats.mxfp8 import MxFp8Tensor
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.weights.source import Shard, WeightSource


def load_matrix(source: WeightSource, shards: Sequence[Shard], *, groups: int | None = None) -> Matrix:
    """Merge ``shards`` (all of one storage) by rows; with ``groups``, split the rows into [groups, N/groups, K]."""
    matrices = [source.read_matrix(shard.stem, rows=shard.rows, cols=shard.cols) for shard in shards]
    matrix = concatenate(matrices, [shard.stem for shard in shards])
    if groups is None:
        return matrix
    if isinstance(matrix, Tensor):
        return matrix.unflatten(0, (groups, -1))
    return NvFp4Tensor(
        matrix.packed.unflatten(0, (groups, -1)),
        matrix.block_scale.unflatten(0, (groups, -1)),
        matrix.global_scale_of_rows().unflatten(0, (groups, -1)),
    )


def load_mxfp8(
    source: WeightSource, shards: Sequence[Shard], *, groups: int | None = None
) -> tuple[MxFp8Tensor, list[int]]:
    """FP8 ``shards`` merged by rows, in MXFP8, a copy, and the rows of each; with ``groups`` [groups, N/groups, K]."""
    parts = [source.read_mxfp8(shard.stem, rows=shard.rows, cols=shard.cols) for shard in shards]
    # As bytes: torch does not concatenate e4m3 everywhere.
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    scale, rows = torch.cat([part.scale for part in parts]), [len(part.codes) for part in parts]
    if groups is not None:
        codes, scale = codes.unflatten(0, (groups, -1)), scale.unflatten(0, (groups, -1))
    return MxFp8Tensor(codes, scale), rows


def concatenate(matrices: Sequence[Matrix], names: Sequence[str]) -> Matrix:
    """Merge matrices of one storage by rows; each row keeps its global scale. ``names`` are for the error."""
    if len(matrices) == 1:
        return matrices[0]
    fp4, plain = _sort(matrices, names)
    return merge(fp4) if fp4 else torch.cat(plain)


def stack(matrices: Sequence[Matrix], names: Sequence[str]) -> Matrix:
    """Batch equally shaped matrices of one storage (one an expert) along a new first dimension."""
    fp4, plain = _sort(matrices, names)
    if plain:
        return torch.stack(plain)
    merged = merge(fp4)
    return NvFp4Tensor(
        merged.packed.unflatten(0, (len(fp4), -1)),
        merged.block_scale.unflatten(0, (len(fp4), -1)),
        merged.global_scale.unflatten(0, (len(fp4), -1)),
    )


def merge(matrices: Sequence[NvFp4Tensor]) -> NvFp4Tensor:
    """Matrices [N, K] one below the other; each row keeps its global scale."""
    # As bytes: torch does not concatenate e4m3 everywhere.
    block_scales = torch.cat([matrix.block_scale.view(torch.uint8) for matrix in matrices])
    return NvFp4Tensor(
        torch.cat([matrix.packed for matrix in matrices]),
        block_scales.view(torch.float8_e4m3fn),
        torch.cat([matrix.global_scale_of_rows() for matrix in matrices]),
    )


def _sort(matrices: Sequence[Matrix], names: Sequence[str]) -> tuple[list[NvFp4Tensor], list[Tensor]]:
    fp4 = [m for m in matrices if isinstance(m, NvFp4Tensor)]
    plain = [m for m in matrices if isinstance(m, Tensor)]
    if fp4 and plain:
        kinds = [
            f"{n} is {'NVFP4' if isinstance(m, NvFp4Tensor) else 'not'}" for n, m in zip(names, matrices, strict=True)
        ]
        raise CheckpointError(
            f"matrices that are merged must all be NVFP4 or all be not; found: {'; '.join(kinds[:8])};"
            " quantise all of them or none"
        )
    return fp4, plain
