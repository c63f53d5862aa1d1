"""Inputs of draft models on a GPU (specification §7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.targets.fused.activations import in_form
from nvfp4_sgl.targets.fused.gemm_backend import Backends
from nvfp4_sgl.targets.fused.projections import Projection
from nvfp4_sgl.triton_kernels.hyper_connection.draft_inputs import add_to_streams, stream_means
from nvfp4_sgl.triton_kernels.hyper_connection.streams import rms_norm
from nvfp4_sgl.weights.source import Shard, frozen

MAX_PART = 512
"""Tokens whose streams are multiplied at once. With four streams each that is 2048 rows, as many as a GEMM needs to run
at full speed; without a bound a chunk of 8192 tokens would take 0.75 GB for a moment."""


class FusedMtpInput(nn.Module):
    """Rounding as in the reference: both norms to bf16, the sum of both GEMMs once, from fp32."""

    def __init__(self, backends: Backends, context: Context, stem: str):
        super().__init__()
        self._eps = context.config.rms_norm_eps
        self.enorm, self.hnorm = (frozen(context.read(f"{stem}.{name}.weight")) for name in ("enorm", "hnorm"))
        self.e_proj, self.h_proj = (
            Projection(backends, context, [Shard(f"{stem}.{name}")]) for name in ("e_proj", "h_proj")
        )

    def forward(self, embedded: Tensor, streams: Tensor) -> Tensor:
        token = self._multiply(self.e_proj, embedded, self.enorm)
        out = torch.empty_like(streams)
        for some, streams_of, to in zip(*(each.split(MAX_PART) for each in (token, streams, out)), strict=True):
            add_to_streams(some, self._multiply(self.h_proj, streams_of.flatten(0, 1), self.hnorm), to)
        return out

    def _multiply(self, projection: Projection, x: Tensor, norm: Tensor) -> Tensor:
        """fp32 [rows, d] of the rows of ``x`` [rows, d], normalised."""
        (result,) = projection.multiply(in_form(rms_norm(x, norm, self._eps), projection.takes), torch.float32)
        return result


class FusedDsparkInput(nn.Module):
    """Rounding as in the reference: the means to bf16, the norm's result once, from fp32."""

    def __init__(self, backends: Backends, context: Context, stem: str):
        super().__init__()
        self._eps = context.config.rms_norm_eps
        self.main_proj = Projection(backends, context, [Shard(f"{stem}.main_proj")])
        self.main_norm = frozen(context.read(f"{stem}.main_norm.weight"))

    def forward(self, captured: Sequence[Tensor], takes: Form) -> Activation:
        tokens, _, width = captured[0].shape
        means = stream_means(captured, captured[0].new_empty(tokens, len(captured) * width))
        (projected,) = self.main_proj.multiply(in_form(means, self.main_proj.takes), torch.float32)
        return in_form(rms_norm(projected, self.main_norm, self._eps, out_dtype=torch.bfloat16), takes)
