"""Residual streams on the CPU: embedding and mHC sites."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from nvfp4_sgl.model.contract import Activation, Context, Form, SiteNames
from nvfp4_sgl.model.tokens import Gather
from nvfp4_sgl.ops.hyper_connection import (
    expand_streams,
    hyper_connection_head,
    hyper_connection_post,
    hyper_connection_pre,
)
from nvfp4_sgl.ops.norm import rms_norm
from nvfp4_sgl.weights.parallel import Slot
from nvfp4_sgl.weights.source import frozen


class ReferenceEmbedding(nn.Module):
    """Embedding rows copied to every residual stream."""

    def __init__(self, context: Context):
        super().__init__()
        self._streams = context.config.hc_mult

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return self.expand(table[token_ids])

    def expand(self, embedded: Tensor) -> Tensor:
        return expand_streams(embedded, self._streams)


@dataclass(frozen=True)
class Mix:
    """Coefficients that mix a sublayer's output back: post fp32 [T, n], comb fp32 [T, n, n]; empty behind the final
    collapse."""

    post: Tensor | None = None
    comb: Tensor | None = None


class ReferenceSite(nn.Module):
    """fp32 parameters of one site: ``fn`` [rows, n * d], ``base`` [rows], ``scale`` [3 or 1]; ``norm`` [d]."""

    def __init__(self, context: Context, names: SiteNames, form: Form):
        super().__init__()
        self._config, self._iterations = context.config, names.iterations
        self.fn, self.base, self.scale = (
            frozen(context.read(f"{names.stem}_{part}").float()) for part in ("fn", "base", "scale")
        )
        self.norm = frozen(context.read(names.norm))

    def enter(self, streams: Tensor, step: object, *, gather: Gather | None = None) -> tuple[Activation, Mix]:
        config, mix = self._config, Mix()
        eps = {"hc_eps": config.hc_eps, "norm_eps": config.rms_norm_eps}
        if self._iterations:
            collapsed, post, comb = hyper_connection_pre(
                streams, self.fn, self.base, self.scale, iterations=self._iterations, **eps
            )
            mix = Mix(post, comb)
        else:
            collapsed = hyper_connection_head(streams, self.fn, self.base, self.scale, **eps)
        x = rms_norm(collapsed, self.norm, config.rms_norm_eps)
        return Activation(x if gather is None else gather(x)), mix

    def advance(
        self, output: Tensor | Slot, streams: Tensor, mix: Mix, step: object, *, gather: Gather | None = None
    ) -> tuple[Activation, Tensor, Mix]:
        assert isinstance(output, Tensor), "sublayers of the reference do not send"
        streams = self.leave(output, streams, mix)
        x, mix = self.enter(streams, step, gather=gather)
        return x, streams, mix

    def leave(self, output: Tensor, streams: Tensor, mix: Mix, *, gather: Gather | None = None) -> Tensor:
        assert mix.post is not None and mix.comb is not None, "nothing follows the final collapse"
        streams = hyper_connection_post(output.to(streams.dtype), streams, mix.post, mix.comb)
        return streams if gather is None else gather(streams)
