"""Matrix products on Hopper for now: bf16 on weights that were dequantised at load.

A stand-in until this architecture has NVFP4 kernels: right, but with four times the bytes of packed weights. Each
NVFP4 weight is ``code * block_scale * global_scale`` in fp32, rounded once to bf16 (FP8 weights are exact in bf16);
activations enter as they are, so this is the mode ``w4a16``. Accumulation is the library's, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from nvfp4_sgl.formats.nvfp4 import NvFp4Tensor
from nvfp4_sgl.model.weights import Matrix, NvFp4Matrix, Shard, WeightSource, frozen, load_matrix


def dequantized(matrix: Matrix, device: torch.device) -> Tensor:
    """The matrix in bf16 on ``device``, shape [..., N, K]."""
    if not isinstance(matrix, NvFp4Matrix):
        return matrix.weight.data.to(device).bfloat16()
    one = torch.ones((), dtype=torch.float32, device=device)
    unscaled = NvFp4Tensor(matrix.weight.data.to(device), matrix.weight_scale.data.to(device), one).unscaled()
    rows = torch.tensor(matrix.shard_rows, device=device)
    alpha = matrix.weight_scale_2.data.to(device).repeat_interleave(rows, dim=-1)
    return unscaled.mul_(alpha.unsqueeze(-1)).bfloat16()


def multiply(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``x @ weight^T`` with fp32 accumulation: [T, N] in ``dtype``, bf16 or fp32, from bf16 [T, K] and [N, K]."""
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)
    if not x.is_cuda:  # beside Triton's interpreter: bf16 products of the CPU have no fp32 result
        return out.copy_(x.float() @ weight.float().t())
    if dtype == torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return torch.mm(x, weight.t(), out=out)


class MergedProjection(nn.Module):
    """Matrices that read the same input, as one product: ``weight`` bf16 [sum of rows, K]."""

    def __init__(self, source: WeightSource, shards: Sequence[Shard], device: torch.device):
        super().__init__()
        parts = [dequantized(load_matrix(source, [shard]), device) for shard in shards]
        self._sizes = [part.shape[0] for part in parts]
        self.weight = frozen(torch.cat(parts))

    def forward(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """A column slice [T, rows] in ``dtype`` for each matrix, in the order given."""
        return multiply(x, self.weight, dtype).split(self._sizes, dim=1)


class GroupedProjection(nn.Module):
    """Block-diagonal product (spec section 3.4): ``weight`` bf16 [G, N, K]."""

    def __init__(self, source: WeightSource, shard: Shard, groups: int, device: torch.device):
        super().__init__()
        self.weight = frozen(dequantized(load_matrix(source, [shard], groups=groups), device))

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [T, G * N] from bf16 [T, G, K]."""
        groups, rows, _ = self.weight.shape
        out = x.new_empty(x.shape[0], groups, rows)
        if not x.is_cuda:
            out.copy_(torch.einsum("tgk,gnk->tgn", x.float(), self.weight.float()))
        else:
            torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2), out=out.transpose(0, 1))
        return out.view(x.shape[0], groups * rows)


class ExpertProjection(nn.Module):
    """One product an expert, all of one shape: ``weight`` bf16 [E, N, K]."""

    def __init__(self, matrices: Iterable[Matrix], count: int, device: torch.device):
        super().__init__()
        weight: Tensor | None = None
        for index, matrix in enumerate(matrices):
            part = dequantized(matrix, device)
            if weight is None:
                weight = part.new_empty(count, *part.shape)
            weight[index].copy_(part)
        assert weight is not None
        self.weight = frozen(weight)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """bf16 [R, N] from bf16 [R, K]: rows ``ends[e - 1] .. ends[e] - 1`` by expert e, ``ends`` int32 [E]."""
        return functional.grouped_mm(rows, self.weight.transpose(1, 2), offs=ends)
