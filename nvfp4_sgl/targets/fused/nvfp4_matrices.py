"""NVFP4 matrices on their way to GEMMs: merged and packed, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.model.contract import Context
from nvfp4_sgl.weights.layout import ExpertMatrices, expert_batches
from nvfp4_sgl.weights.matrix import load_matrix, merge
from nvfp4_sgl.weights.source import Shard


def load_nvfp4(context: Context, shards: Sequence[Shard], groups: int | None = None) -> tuple[NvFp4Tensor, list[int]]:
    """Shards merged by rows [N, K], and the rows of each; with ``groups`` [groups, N/groups, K] of a single shard.

    Raises:
        CheckpointError: a shard is not NVFP4; names it.
    """
    if groups is not None:
        matrix = _packed(context, shards, groups)
        return matrix, [groups * matrix.shape[1]]
    parts = [_packed(context, [shard]) for shard in shards]
    return merge(parts), [part.shape[0] for part in parts]


def load_experts(
    context: Context, matrices: Sequence[ExpertMatrices]
) -> Iterator[tuple[int, NvFp4Tensor, NvFp4Tensor]]:
    """Gate and up [n, 2, I, K], and down [n, F, I], each with its global scale, behind the index of the first expert.

    A few experts at a time, so that no more of a layer is held twice.

    Raises:
        CheckpointError: an expert is not NVFP4; names one of its batch.
    """
    for first, batch in expert_batches(context.source, matrices):
        halves = (len(batch), 2)
        gate_up = _packed(context, [shard for expert in batch for shard in expert.gate_up], 2 * len(batch))
        down = _packed(context, [expert.down for expert in batch], len(batch))
        yield (
            first,
            NvFp4Tensor(
                gate_up.packed.unflatten(0, halves),
                gate_up.block_scale.unflatten(0, halves),
                gate_up.global_scale[:, 0].unflatten(0, halves),
            ),
            NvFp4Tensor(down.packed, down.block_scale, down.global_scale[:, 0]),
        )


def expert_sizes(context: Context) -> tuple[int, int]:
    """Rows of an expert's gate on this rank, and its columns."""
    return len(context.parallel.experts(context.config).inner), context.config.hidden_size


def _packed(context: Context, shards: Sequence[Shard], groups: int | None = None) -> NvFp4Tensor:
    matrix = load_matrix(context.source, shards, groups=groups)
    if isinstance(matrix, Tensor):
        stem = shards[0].stem
        raise CheckpointError(
            f"tensor '{stem}.weight': expected NVFP4, found {context.source.storage(stem).value}: the target has no"
            " other GEMMs for it; quantise this matrix too"
        )
    return matrix.to(context.device)
