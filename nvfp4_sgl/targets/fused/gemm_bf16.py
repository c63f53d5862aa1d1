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
from nvfp4_sgl.model.contract import Columns, Context, Form, Operand
from nvfp4_sgl.targets.fused.operands import in_form
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.targets.reference.projections import columns_of
from nvfp4_sgl.triton_kernels import ahead
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
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


def multiply_small(x: Tensor, weight: Tensor, semaphores: Tensor) -> Tensor:
    """``x @ weight^T`` in fp32 for a small matrix: by the kernel for few tokens where that is faster than the library.

    Args:
        x: bf16 [T, K].
        weight: bf16 [N, K].
        semaphores: int32, the step's ``small_product_semaphores``.
    """
    if len(x) <= max_tokens(*weight.shape):
        return router_logits(x, weight, semaphores)
    return multiply(x, weight, torch.float32)


class Bf16Projection(nn.Module):
    """Matrices that read the same activation, merged into one GEMM: ``weight`` bf16 [sum of rows, K]."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard]):
        super().__init__()
        parts = [dequantized(load_matrix(context.source, [shard]), context.device) for shard in shards]
        self.sizes = [part.shape[0] for part in parts]
        self.weight = frozen(torch.cat(parts))

    def product(self, x: Operand, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The columns of each shard, slices [T, rows] in ``dtype``, bf16 or fp32."""
        return multiply(x.require_values(), self.weight, dtype).split(self.sizes, dim=1)

    def forward(self, x: Operand) -> list[Tensor]:
        """The columns of each shard in bf16."""
        return list(self.product(x, torch.bfloat16))


class Bf16InputProjection(nn.Module):
    """The first GEMMs of an attention layer, that of the index weights included, merged into one."""

    takes = Form.VALUES

    def __init__(self, context: Context, shards: Sequence[Shard], index_weights: Shard | None):
        super().__init__()
        self._is_indexed = index_weights is not None
        self.projection = Bf16Projection(context, [*shards, *([index_weights] if index_weights else [])])

    def forward(self, x: Operand) -> Columns:
        """The layer's columns in fp32."""
        return columns_of(self.projection.product(x, torch.float32), indexed=self._is_indexed)


class Bf16GroupedProjection(nn.Module):
    """The block-diagonal GEMM of the attention output (specification §3.4): ``weight`` bf16 [G, N, K]."""

    takes = Form.VALUES

    def __init__(self, context: Context, shard: Shard, groups: int):
        super().__init__()
        self.weight = frozen(dequantized(load_matrix(context.source, [shard], groups=groups), context.device))

    def forward(self, x: Operand, form: Form) -> Operand:
        values = x.require_values()
        groups, rows, _ = self.weight.shape
        out = values.new_empty(values.shape[0], groups, rows)
        if not values.is_cuda:
            out.copy_(torch.einsum("tgk,gnk->tgn", values.float(), self.weight.float()))
        else:
            torch.bmm(values.transpose(0, 1), self.weight.transpose(1, 2), out=out.transpose(0, 1))
        return in_form(out.view(values.shape[0], groups * rows), form)


class Bf16ExpertProjection(nn.Module):
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


class Bf16SharedExpert(nn.Module):
    """The shared expert by itself: two GEMMs with SwiGLU between them."""

    def __init__(self, context: Context, matrices: ExpertMatrices):
        super().__init__()
        source, device, self._limit = context.source, context.device, context.config.swiglu_limit
        self.w13 = frozen(dequantized(load_matrix(source, matrices.gate_up), device))
        self.w2 = frozen(dequantized(load_matrix(source, [matrices.down]), device))

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [T, d]; the rows between the GEMMs are bf16."""
        gate_up = multiply(x, self.w13, torch.bfloat16)
        hidden = swiglu(gate_up, self._limit, x.new_empty(x.shape[0], gate_up.shape[1] // 2))
        return multiply(hidden, self.w2, torch.bfloat16)


class Bf16Experts(nn.Module):
    """Routed and shared experts as two grouped GEMMs with SwiGLU between them; rows have no padding."""

    takes, has_shared_group = Form.VALUES, True

    def __init__(self, context: Context, matrices: Sequence[ExpertMatrices]):
        super().__init__()
        source, device, self._config = context.source, context.device, context.config
        gate_up = (load_matrix(source, expert.gate_up) for expert in matrices)
        down = (load_matrix(source, [expert.down]) for expert in matrices)
        self.w13 = Bf16ExpertProjection(gate_up, len(matrices), device)
        self.w2 = Bf16ExpertProjection(down, len(matrices), device)
        self._groups, self._device = len(matrices), device

    def new_routes(self, tokens: int) -> Routes:
        """Routes with one group more than there are experts, which no token visits.

        The offset of each group is the end of the one before, and so the last expert's end is an offset, too.
        """
        routes = Routes.allocate(tokens, self._config.num_experts_per_tok + 1, self._groups + 1, 1, self._device)
        # Passes that only tell what would be launched do not route, but torch's GEMM runs, and asserts that its offsets
        # lie within the rows.
        if ahead.is_recording():
            routes.offsets.zero_()
        return routes

    def forward(self, x: Operand, routes: Routes, step: Step) -> Tensor:
        """The weighted sum of experts, bf16 [T, d]."""
        values, ends = x.require_values(), routes.offsets[1:]
        rows = values.new_empty(routes.source_row.shape[0], values.shape[1])
        gate_up = self.w13(scatter_rows(values, routes.destination, rows), ends)
        hidden = values.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        swiglu(gate_up, self._config.swiglu_limit, hidden)
        return finalize(self.w2(hidden, ends), routes.destination, routes.weights, torch.empty_like(values))
