"""Matrices as a rank stores them: bit for bit what the checkpoint holds.

NVFP4 stays packed: ``weight`` uint8 (two codes a byte), ``weight_scale`` e4m3 per 16, ``weight_scale_2`` one fp32 a
shard. FP8 128x128 weights become the bf16 values that they stand for (e4m3 times a power of two is exact in bf16);
plain weights keep their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.checkpoint.reader import Storage
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.weights.source import Shard, WeightSource, frozen


class NvFp4Matrix(nn.Module):
    """One or more NVFP4 matrices stacked by rows, possibly batched (experts, o-groups).

    Parameters:
        weight: uint8 [..., N, K/2]. weight_scale: e4m3 [..., N, K/16].
        weight_scale_2: fp32 [..., S], one global scale a shard; shard s owns ``shard_rows[s]`` rows.
    """

    def __init__(self, weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, shard_rows: tuple[int, ...]):
        super().__init__()
        self.weight = frozen(weight)
        self.weight_scale = frozen(weight_scale)
        self.weight_scale_2 = frozen(weight_scale_2)
        self.shard_rows = shard_rows

    def alpha(self) -> Tensor:
        """fp32 [..., N]: the global scale of the shard that each row belongs to."""
        rows = torch.tensor(self.shard_rows, device=self.weight_scale_2.device)
        return self.weight_scale_2.data.repeat_interleave(rows, dim=-1)


class PlainMatrix(nn.Module):
    """Unquantised rows [..., N, K] in the checkpoint's dtype."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = frozen(weight)


Matrix = NvFp4Matrix | PlainMatrix


def load_matrix(reader: WeightSource, shards: Sequence[Shard], *, groups: int | None = None) -> Matrix:
    """Stack ``shards`` (all of one storage) by rows; with ``groups``, split the rows into [groups, N/groups, K]."""
    matrix = concatenate([_load_shard(reader, shard) for shard in shards], [shard.stem for shard in shards])
    if groups is None:
        return matrix
    shape = (groups, matrix.weight.shape[0] // groups)
    if isinstance(matrix, PlainMatrix):
        return PlainMatrix(matrix.weight.data.unflatten(0, shape))
    assert len(shards) == 1
    return NvFp4Matrix(
        matrix.weight.data.unflatten(0, shape),
        matrix.weight_scale.data.unflatten(0, shape),
        matrix.weight_scale_2.data.expand(groups, 1).contiguous(),
        (shape[1],),
    )


def _load_shard(reader: WeightSource, shard: Shard) -> Matrix:
    storage = reader.storage(shard.stem)
    if storage is Storage.NVFP4:
        part = reader.read_nvfp4(shard.stem, rows=shard.rows, cols=shard.cols)
        return NvFp4Matrix(part.packed, part.block_scale, part.global_scale.reshape(1), (part.packed.shape[0],))
    if storage is Storage.FP8:
        exact = reader.read_fp8(shard.stem, rows=shard.rows, cols=shard.cols)
        rounded = exact.bfloat16()
        return PlainMatrix(rounded if torch.equal(rounded.float(), exact) else exact)
    return PlainMatrix(reader.read(f"{shard.stem}.weight", rows=shard.rows, cols=shard.cols))


def _combine(combine: Callable[[list[Tensor]], Tensor], scales: list[Tensor]) -> Tensor:
    """``combine`` for e4m3 tensors, bit for bit."""
    return combine([scale.view(torch.uint8) for scale in scales]).view(torch.float8_e4m3fn)


def concatenate(matrices: Sequence[Matrix], names: Sequence[str]) -> Matrix:
    """Stack matrices of one storage by rows; each keeps its global scale. ``names`` are for the error."""
    fp4, plain = _sort(matrices, names)
    if plain:
        return PlainMatrix(torch.cat([m.weight.data for m in plain]))
    return NvFp4Matrix(
        torch.cat([m.weight.data for m in fp4]),
        _combine(torch.cat, [m.weight_scale.data for m in fp4]),
        torch.cat([m.weight_scale_2.data for m in fp4]),
        tuple(rows for m in fp4 for rows in m.shard_rows),
    )


def stack(matrices: Sequence[Matrix], names: Sequence[str]) -> Matrix:
    """Batch equally shaped matrices of one storage (one an expert) along a new first dimension."""
    fp4, plain = _sort(matrices, names)
    if plain:
        return PlainMatrix(torch.stack([m.weight.data for m in plain]))
    return NvFp4Matrix(
        torch.stack([m.weight.data for m in fp4]),
        _combine(torch.stack, [m.weight_scale.data for m in fp4]),
        torch.stack([m.weight_scale_2.data for m in fp4]),
        fp4[0].shard_rows,
    )


def _sort(matrices: Sequence[Matrix], names: Sequence[str]) -> tuple[list[NvFp4Matrix], list[PlainMatrix]]:
    fp4 = [m for m in matrices if isinstance(m, NvFp4Matrix)]
    plain = [m for m in matrices if isinstance(m, PlainMatrix)]
    if fp4 and plain:
        kinds = [
            f"{n} is {'NVFP4' if isinstance(m, NvFp4Matrix) else 'not'}" for n, m in zip(names, matrices, strict=True)
        ]
        raise CheckpointError(
            f"matrices that are merged must all be NVFP4 or all be not; found: {'; '.join(kinds[:8])};"
            " quantise all of them or none"
        )
    return fp4, plain
