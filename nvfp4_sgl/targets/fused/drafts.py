"""Inputs of draft models on a GPU (specification §7)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from nvfp4_sgl.model.contract import Activation, Context, DsparkBoundaries, Form
from nvfp4_sgl.targets.fused.activations import in_form
from nvfp4_sgl.targets.fused.gemm_backend import Backends
from nvfp4_sgl.targets.fused.gemm_bf16 import multiply
from nvfp4_sgl.targets.fused.projections import Projection
from nvfp4_sgl.triton_kernels.hyper_connection.draft_inputs import add_to_streams, stream_mean
from nvfp4_sgl.triton_kernels.hyper_connection.streams import rms_norm
from nvfp4_sgl.triton_kernels.logits.markov import draft_greedily, semaphores_for
from nvfp4_sgl.triton_kernels.plan.resolve import MAX_REQUESTS
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
    """Rounding as in the reference: the norm's result once, from fp32."""

    def __init__(self, backends: Backends, context: Context, stem: str):
        super().__init__()
        self._eps = context.config.rms_norm_eps
        self.main_proj = Projection(backends, context, [Shard(f"{stem}.main_proj")])
        self.main_norm = frozen(context.read(f"{stem}.main_norm.weight"))

    def forward(self, means: Tensor, takes: Form) -> Activation:
        (projected,) = self.main_proj.multiply(in_form(means, self.main_proj.takes), torch.float32)
        return in_form(rms_norm(projected, self.main_norm, self._eps, out_dtype=torch.bfloat16), takes)


class FusedDsparkGuesses(nn.Module):
    """The LM head's GEMM on bf16 operands with fp32 sums, then a launch a token; no matrix is stored in fp32."""

    def __init__(self, context: Context, stem: str):
        super().__init__()
        self.w1, self.w2 = (
            frozen(context.read(f"{stem}.markov_head.{name}.weight").bfloat16()) for name in ("markov_w1", "markov_w2")
        )
        self._semaphores = torch.zeros(semaphores_for(MAX_REQUESTS), dtype=torch.int32, device=context.device)

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return multiply(hidden, head[: len(self.w2)], torch.float32)

    def choose(self, logits: Tensor, anchor: Tensor) -> Tensor:
        return draft_greedily(logits, anchor, self.w1.data, self.w2.data, self._semaphores)


def dspark(backends: Backends) -> DsparkBoundaries:
    """DSpark's parts, whose GEMM is one of ``backends``."""
    return DsparkBoundaries(stream_mean, partial(FusedDsparkInput, backends), FusedDsparkGuesses)
