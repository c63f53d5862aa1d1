"""Inputs of draft models on the CPU (specification §7)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from nvfp4_sgl.model.contract import Activation, Context, Form
from nvfp4_sgl.ops.drafts import mtp_streams, stream_means
from nvfp4_sgl.ops.norm import rms_norm
from nvfp4_sgl.targets.reference.projections import ReferenceProjection
from nvfp4_sgl.weights.source import Shard, frozen


class ReferenceMtpInput(nn.Module):
    """Rounding: both norms to the model dtype, the sum of both GEMMs once, from fp32."""

    def __init__(self, context: Context, stem: str):
        super().__init__()
        self._eps = context.config.rms_norm_eps
        self.enorm, self.hnorm = (frozen(context.read(f"{stem}.{name}.weight")) for name in ("enorm", "hnorm"))
        self.e_proj, self.h_proj = (
            ReferenceProjection(context, [Shard(f"{stem}.{name}")]) for name in ("e_proj", "h_proj")
        )

    def forward(self, embedded: Tensor, streams: Tensor) -> Tensor:
        (token,) = self.e_proj(Activation(rms_norm(embedded, self.enorm, self._eps)))
        (hidden,) = self.h_proj(Activation(rms_norm(streams, self.hnorm, self._eps).flatten(0, 1)))
        return mtp_streams(token, hidden.view(streams.shape)).to(streams.dtype)


class ReferenceDsparkInput(nn.Module):
    """Rounding: the means to the model dtype, the norm's result once, from fp32."""

    def __init__(self, context: Context, stem: str):
        super().__init__()
        self._eps, self._dtype = context.config.rms_norm_eps, context.dtype
        self.main_proj = ReferenceProjection(context, [Shard(f"{stem}.main_proj")])
        self.main_norm = frozen(context.read(f"{stem}.main_norm.weight"))

    def forward(self, captured: Sequence[Tensor], takes: Form) -> Activation:
        (projected,) = self.main_proj(Activation(stream_means(captured).to(self._dtype)))
        return Activation(rms_norm(projected, self.main_norm, self._eps, out_dtype=self._dtype))
