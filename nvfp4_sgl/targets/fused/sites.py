"""Residual streams on a GPU (specification §2).

An mHC site spans from one sublayer's output to the next one's quantised input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from nvfp4_sgl.formats.rows import Rows
from nvfp4_sgl.model.contract import Activation, Context, Form, SiteNames
from nvfp4_sgl.model.policy import Choice
from nvfp4_sgl.model.tokens import Gather
from nvfp4_sgl.targets.fused.activations import in_form, new_rows
from nvfp4_sgl.targets.fused.step import Step
from nvfp4_sgl.triton_kernels.common.inbox import Inbox
from nvfp4_sgl.triton_kernels.hyper_connection.site import (
    Site,
    SiteState,
    hyper_connection_next,
    hyper_connection_post,
    hyper_connection_pre,
    split_fn,
)
from nvfp4_sgl.triton_kernels.hyper_connection.streams import embed_streams, expand_streams
from nvfp4_sgl.weights.parallel import Slot
from nvfp4_sgl.weights.source import frozen


class FusedEmbedding(nn.Module):
    """The embedding: rows copied to every residual stream, in bf16."""

    def __init__(self, context: Context):
        super().__init__()
        self._streams = context.config.hc_mult

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return embed_streams(token_ids, table, self._streams)

    def expand(self, embedded: Tensor) -> Tensor:
        return expand_streams(embedded, self._streams)


@dataclass(frozen=True)
class Mix:
    """The state that passes from site to site: coefficients and workspace, and NVFP4 rows once a site has made any."""

    state: SiteState
    rows: Rows | None = None


class FusedSite(nn.Module):
    """One mHC site with the RMSNorm behind it: parameters in fp32, ``fn`` as three bf16 (specification §2)."""

    def __init__(self, context: Context, names: SiteNames, form: Form):
        super().__init__()
        config, self._form, self._policy = context.config, form, context.policy
        self.fn = frozen(split_fn(context.read(f"{names.stem}_fn").float()))
        self.base, self.scale, self.norm = (
            frozen(context.read(name).float()) for name in (f"{names.stem}_base", f"{names.stem}_scale", names.norm)
        )
        self.site = Site(
            self.fn.data,
            self.base.data,
            self.scale.data,
            config.hc_eps,
            config.rms_norm_eps,
            self.norm.data,
            names.iterations,
        )

    def enter(self, streams: Tensor, step: Step, *, gather: Gather | None = None) -> tuple[Activation, Mix]:
        tokens, _, d = streams.shape
        planned = self._policy.tokens(Choice.SITE, tokens)
        state = SiteState.allocate(tokens, d, streams.device, semaphores=step.site_semaphores, planned_tokens=planned)
        mix = self._ready(Mix(state), gather)
        hyper_connection_pre(self.site, streams, mix.state)
        return self._input(mix, gather), mix

    def advance(
        self, output: Tensor | Slot, streams: Tensor, mix: Mix, step: Step, *, gather: Gather | None = None
    ) -> tuple[Activation, Tensor, Mix]:
        """The sublayer's input, the streams and the mix; ``streams`` are overwritten."""
        mix = self._ready(mix, gather)
        whole = Inbox(output.parts) if isinstance(output, Slot) else output
        streams = hyper_connection_next(self.site, whole, streams, mix.state)
        return self._input(mix, gather), streams, mix

    def leave(self, output: Tensor, streams: Tensor, mix: Mix, *, gather: Gather | None = None) -> Tensor:
        streams = hyper_connection_post(output, streams, mix.state.post, mix.state.comb, out=streams)
        return streams if gather is None else gather(streams)

    def _ready(self, mix: Mix, gather: Gather | None) -> Mix:
        """``mix`` with NVFP4 rows if the site itself makes any; rows of an earlier site are used again."""
        if Form.NVFP4 not in self._form or gather is not None:
            return Mix(replace(mix.state, quantized=None), mix.rows)
        tokens, d = mix.state.x.shape
        rows = mix.rows or new_rows(tokens, d, mix.state.x.device)
        return Mix(replace(mix.state, quantized=rows), rows)

    def _input(self, mix: Mix, gather: Gather | None) -> Activation:
        if gather is not None:
            return in_form(gather(mix.state.x), self._form)
        return Activation(mix.state.x, mix.rows if Form.NVFP4 in self._form else None)
