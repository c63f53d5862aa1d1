"""bf16 GEMMs on weights that were dequantised at load: what no other GEMM takes on Hopper, plain matrices on SM100.

FP8 weights with UE8M0 scales, exact in bf16, take twice their bytes. An NVFP4 weight that is merged with others is
``code * block_scale * global_scale`` in fp32, rounded once to bf16. Activations are not quantised. The GEMMs are
torch's, with fp32 accumulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from nvfp4_sgl.checkpoint.decoders import Matrix
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.model.policy import Choice
from nvfp4_sgl.targets.fused.gated import SwiGluGemm
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.triton_kernels.experts.router_logits import max_tokens, router_logits
from nvfp4_sgl.triton_kernels.experts.swiglu import scatter_rows, swiglu
from nvfp4_sgl.weights.layout import ExpertMatrices
from nvfp4_sgl.weights.matrix import load_matrix
from nvfp4_sgl.weights.source import Shard, frozen


def dequantized(matrix: Matrix, device: torch.device) -> Tensor:
    """Dequantise a matrix to bf16 on ``device``, [..., N, K]; a copy."""
    if isinstance(matrix, Tensor):
        return matrix.to(device, torch.bfloat16, copy=True)
    moved = matrix.to(device)
    return moved.unscaled().mul_(moved.global_scale_of_rows().unsqueeze(-1)).bfloat16()


def multiply(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``x @ weight^T`` with fp32 accumulation: [T, N] in ``dtype``, bf16 or fp32, from bf16 [T, K] and [N, K]."""
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)
    if not x.is_cuda:  # with Triton's interpreter: bf16 GEMMs on the CPU have no fp32 result
        return out.copy_(x.float() @ weight.float().t())
    if dtype == torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
    return torch.mm(x, weight.t(), out=out)


def multiply_groups(x: Tensor, weight: Tensor) -> Tensor:
    """``x[:, g] @ weight[g]^T`` with fp32 accumulation: bf16 [T, G, N] from bf16 [T, G, K] and [G, N, K]."""
    out = x.new_empty(x.shape[0], *weight.shape[:2])
    if not x.is_cuda:
        return out.copy_(torch.einsum("tgk,gnk->tgn", x.float(), weight.float()))
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


def multiply_small(x: Tensor, weight: Tensor, step: Step) -> Tensor:
    """``x @ weight^T`` in fp32 for a small matrix: by the kernel for few tokens where that is faster than the library.

    Args:
        x: bf16 [T, K].
        weight: bf16 [N, K].
    """
    planned = step.planned[Choice.SMALL_GEMM]
    if planned <= max_tokens(*weight.shape):
        return router_logits(x, weight, step.small_gemm_semaphores, planned_tokens=planned)
    return multiply(x, weight, torch.float32)


class Bf16Gemm(nn.Module):
    """A library's GEMM: ``weight`` bf16 [sum of rows, K] or [G, N, K]. A block-diagonal one writes bf16 alone."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard], groups: int | None = None):
        super().__init__()
        parts = [dequantized(load_matrix(context.source, [each], groups=groups), context.device) for each in shards]
        self.sizes = [len(part) for part in parts]
        self.weight = frozen(parts[0] if len(parts) == 1 else torch.cat(parts))

    def forward(self, x: Activation, dtype: torch.dtype, features: int | None = None) -> Tensor:
        values = x.require_values()
        if self.weight.dim() == 2:
            return multiply(values, self.weight[:features], dtype)
        assert dtype == torch.bfloat16
        return multiply_groups(values, self.weight)


class Bf16ExpertWeights(nn.Module):
    """The grouped GEMM of experts, all of one shape: ``weight`` bf16 [E, N, K]."""

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
        """bf16 [R, N] from bf16 [R, K]; expert e takes rows ``ends[e - 1] .. ends[e] - 1``, ``ends`` int32 [E]."""
        return functional.grouped_mm(rows, self.weight.transpose(1, 2), offs=ends)


class Bf16ExpertGemms(nn.Module):
    """Two grouped GEMMs with SwiGLU between them; rows have no padding.

    There is one group more than there are experts, which no token visits: the offset of each group is the end of the
    one before, and so the last expert's end is an offset, too.
    """

    def __init__(self, context: Context, matrices: Sequence[ExpertMatrices]):
        super().__init__()
        source, device, self._limit = context.source, context.device, context.config.swiglu_limit
        gate_up = (load_matrix(source, expert.gate_up) for expert in matrices)
        down = (load_matrix(source, [expert.down]) for expert in matrices)
        self.w13 = Bf16ExpertWeights(gate_up, len(matrices), device)
        self.w2 = Bf16ExpertWeights(down, len(matrices), device)
        self.groups = len(matrices) + 1

    def token_tile(self, rows: int) -> int:
        return 1

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        # Passes that only tell what would be launched do not route, but torch's GEMM runs, and asserts that its offsets
        # lie within the rows.
        if ahead.is_recording():
            routes.offsets.zero_()
        ends = routes.offsets[1:]
        rows = scatter_rows(x, routes.destination, x.new_empty(len(routes.source_row), x.shape[1]))
        gate_up = self.w13(rows, ends)
        hidden = swiglu(gate_up, self._limit, x.new_empty(len(rows), gate_up.shape[1] // 2))
        out: Tensor = self.w2(hidden, ends)
        return out


class Bf16:
    """The backend of matrices that are multiplied in bf16."""

    def load(self, context: Context, shards: Sequence[Shard], groups: int | None = None) -> Bf16Gemm:
        return Bf16Gemm(context, shards, groups)

    def load_gated(self, context: Context, shards: Sequence[Shard]) -> SwiGluGemm:
        return SwiGluGemm(self.load(context, shards), torch.bfloat16)

    def load_experts(self, context: Context, matrices: Sequence[ExpertMatrices]) -> Bf16ExpertGemms:
        return Bf16ExpertGemms(context, matrices)
