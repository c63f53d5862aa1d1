"""Experts of a layer on any backend: routed ones, and the shared one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.errors import UnsupportedError
from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.targets.fused.gemm_backend import Backends, ExpertGemms, GatedBackend, GatedGemm, Gemm
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.triton_kernels.experts.finalize import finalize
from nvfp4_sgl.triton_kernels.experts.permutation import Routes
from nvfp4_sgl.weights.layout import ExpertMatrices


class SharedExpert(nn.Module):
    """The shared expert by itself; the rows between its GEMMs are bf16."""

    def __init__(self, backend: GatedBackend, context: Context, matrices: ExpertMatrices):
        super().__init__()
        self._limit = context.config.swiglu_limit
        self.w13: GatedGemm = backend.load_gated(context, matrices.gate_up)
        self.w2: Gemm = backend.load(context, [matrices.down])

    def forward(self, x: Tensor) -> Tensor:
        """bf16 [T, d] from bf16 [T, d]."""
        return self.w2(Activation(self.w13(x, self._limit)), torch.bfloat16)


class Experts(nn.Module):
    """Routed experts, and the shared one as one more of their groups if the target's rule says so, else by itself.

    Attributes:
        has_shared_group: whether the shared expert is the last of the groups.
    """

    takes = Form.VALUES

    def __init__(self, backends: Backends, context: Context, matrices: Sequence[ExpertMatrices]):
        super().__init__()
        *routed, shared = matrices
        of_routed, of_shared = backends.target.merge.experts(
            (kind for expert in routed for kind in backends.kinds(context, expert.shards)),
            backends.kinds(context, shared.shards),
        )
        share = context.parallel.experts(context.config)
        if share.routed != tuple(range(context.config.n_routed_experts)):
            raise UnsupportedError(
                f"routed experts {share.routed} on a rank: expected every expert in order on a GPU, whose router sorts"
                " tokens into a group for each"
            )
        self.has_shared_group = backends.target.merge.groups_shared(of_routed, of_shared, share)
        groups = matrices if self.has_shared_group else routed
        self.gemms: ExpertGemms = backends.experts[of_routed].load_experts(context, groups)
        self.shared: SharedExpert | None = None
        if not self.has_shared_group:
            self.shared = SharedExpert(backends.shared[of_shared], context, shared)
        self._visits, self._device = context.config.num_experts_per_tok + self.has_shared_group, context.device

    def new_routes(self, tokens: int) -> Routes:
        """Routes whose groups begin at multiples of the GEMMs' token tile."""
        tile = self.gemms.token_tile(tokens * self._visits)
        return Routes.allocate(tokens, self._visits, self.gemms.groups, tile, self._device)

    def forward(self, x: Activation, routes: Routes, step: Step) -> Tensor:
        """The weighted sum of experts, bf16 [T, d]; weights multiply the bf16 rows of the last GEMM, sums are fp32.

        A shared expert that runs apart is added last.
        """
        return self.send(x, routes, step, [torch.empty_like(x.require_values())])

    def send(self, x: Activation, routes: Routes, step: Step, places: Sequence[Tensor]) -> Tensor:
        """The same, stored in all of ``places``, bf16 [T, d] each; returns the first."""
        values = x.require_values()
        rows = self.gemms(values, routes)
        shared = None if self.shared is None else self.shared(values)
        out, *copies = places
        return finalize(rows, routes.destination, routes.weights, out, shared=shared, copies=copies)
