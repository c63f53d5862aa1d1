"""Inputs of draft models on the CPU (specification §7)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from nvfp4_sgl.model.contract import Activation, Context, DsparkBoundaries, Form
from nvfp4_sgl.ops.drafts import draft_greedily, mtp_streams, stream_mean
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
    """Rounding: the norm's result once, from fp32."""

    def __init__(self, context: Context, stem: str):
        super().__init__()
        self._eps, self._dtype = context.config.rms_norm_eps, context.dtype
        self.main_proj = ReferenceProjection(context, [Shard(f"{stem}.main_proj")])
        self.main_norm = frozen(context.read(f"{stem}.main_norm.weight"))

    def forward(self, means: Tensor, takes: Form) -> Activation:
        (projected,) = self.main_proj(Activation(means))
        return Activation(rms_norm(projected, self.main_norm, self._eps, out_dtype=self._dtype))


class ReferenceDsparkGuesses(nn.Module):
    """Everything in fp32."""

    def __init__(self, context: Context, stem: str):
        super().__init__()
        self.w1, self.w2 = (
            frozen(context.read(f"{stem}.markov_head.{name}.weight")) for name in ("markov_w1", "markov_w2")
        )

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return functional.linear(hidden.float(), head[: len(self.w2)].float())

    def choose(self, logits: Tensor, anchor: Tensor) -> Tensor:
        return draft_greedily(logits, anchor, self.w1, self.w2)


def capture(streams: Tensor, means: Tensor) -> None:
    """Rounding: the means once, to the model dtype."""
    means.copy_(stream_mean(streams))


DSPARK = DsparkBoundaries(capture, ReferenceDsparkInput, ReferenceDsparkGuesses)
