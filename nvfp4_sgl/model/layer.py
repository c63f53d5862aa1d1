"""A layer of two sublayers, each behind its mHC site, and the walk of a pass through sublayers.

The wiring is here alone: the decoder, tracing, profiling, examples and tests walk it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.config import LayerSpec
from nvfp4_sgl.model.attention import Attention
from nvfp4_sgl.model.contract import Activation, Context, Form, Site, SiteNames
from nvfp4_sgl.model.moe import MoE
from nvfp4_sgl.model.tokens import EveryToken, Tokens
from nvfp4_sgl.weights.parallel import Collective, Slot, TensorParallel


@dataclass(frozen=True)
class Sublayer:
    """Attention or experts of a layer, given a pass.

    Attributes:
        name: such as ``layers.3.attn``.
        site: in front of it. takes: what it reads of its input.
        run: from its input to this rank's part of its output [T, d], which is stored in all tensors that are given.
        collective: which sum over ranks makes the output whole.
        sends: whether ``run`` takes tensors.
    """

    name: str
    site: Site[Any, Any]
    takes: Form
    run: Callable[[Activation, Sequence[Tensor]], Tensor]
    collective: Collective
    sends: bool


class Block(nn.Module):
    """Attention and experts of one layer, and the mHC sites in front of them."""

    def __init__(self, context: Context, layer: LayerSpec):
        super().__init__()
        self.spec, stem, iterations = layer, layer.stem, context.config.hc_sinkhorn_iters
        self.attn = Attention(context, layer)
        self.ffn = MoE(context, layer)
        site = context.boundaries.site
        attention = SiteNames(f"{stem}.hc_attn", f"{stem}.attn_norm.weight", iterations)
        experts = SiteNames(f"{stem}.hc_ffn", f"{stem}.ffn_norm.weight", iterations)
        self.hc_attn = site(context, attention, self.attn.takes)
        self.hc_ffn = site(context, experts, self.ffn.takes)

    def sublayers(self, token_ids: Tensor, step: object, cache: LayerCache) -> tuple[Sublayer, Sublayer]:
        """Attention, then experts; arguments as of :meth:`.decoder.Decoder.forward`."""
        return (
            Sublayer(
                f"{self.spec.stem}.attn",
                self.hc_attn,
                self.attn.takes,
                lambda x, places: self.attn(x, step, cache, places),
                Collective.ATTENTION_OUTPUT,
                self.attn.sends,
            ),
            Sublayer(
                f"{self.spec.stem}.ffn",
                self.hc_ffn,
                self.ffn.takes,
                lambda x, places: self.ffn(x, token_ids, step, places),
                Collective.EXPERT_OUTPUT,
                self.ffn.sends,
            ),
        )

    def boundaries(self) -> Iterator[tuple[str, Any]]:
        """The layer's boundaries in the order in which they run, each with its name, such as ``attn.project_x``."""
        yield "hc_attn", self.hc_attn
        for name in ("project_x", "prepare", "project_q", "select", "attend", "wo_a", "wo_b"):
            if (boundary := getattr(self.attn, name)) is not None:
                yield f"attn.{name}", boundary
        yield "hc_ffn", self.hc_ffn
        yield "ffn.route", self.ffn.route
        yield "ffn.experts", self.ffn.experts


class Place(enum.Enum):
    """The places where a walk stops."""

    INPUT = enum.auto()
    """In front of a sublayer: ``x`` is its input, ``streams`` what the sublayers before it have left."""
    OUTPUT = enum.auto()
    """Behind it: ``output`` is its output, not yet mixed into the streams."""


class Walk:
    """A pass through sublayers. Iterating over it computes the pass, and stops at every :class:`Place`.

    The caller may read the values at a place, and replace them.

    Attributes:
        sublayer: the one that the walk is at.
        x: input of the sublayer, or of what comes after the last one.
        streams: [T, n, d]. mix: what mixes the output into them.
    """

    sublayer: Sublayer
    mix: object

    def __init__(
        self,
        sublayers: Sequence[Sublayer],
        after: Site[Any, Any] | None,
        streams: Tensor,
        step: object,
        tokens: Tokens | None = None,
        entered: tuple[Activation, object] | None = None,
    ):
        """Arguments:
        after: the site behind the last sublayer; ``None`` for streams alone.
        streams: [T, n, d] of all tokens of the pass; may be overwritten.
        tokens: which of them this rank keeps, all unless given.
        entered: what the first site gave, if it ran already.
        """
        self._sublayers, self._after, self._step, self._entered = sublayers, after, step, entered
        self._tokens = EveryToken(TensorParallel(), len(streams)) if tokens is None else tokens
        self._output: Tensor | Slot
        self.streams = streams

    def __iter__(self) -> Iterator[Place]:
        tokens, step, gather = self._tokens, self._step, self._tokens.gather
        self.streams = tokens.own(self.streams)
        first = self._sublayers[0].site
        self.x, self.mix = self._entered or first.enter(self.streams, step, gather=gather)
        sites = [*(sublayer.site for sublayer in self._sublayers[1:]), self._after]
        for sublayer, site in zip(self._sublayers, sites, strict=True):
            self.sublayer = sublayer
            yield Place.INPUT
            slot = tokens.slot(sublayer.collective) if sublayer.sends and site is not None else None
            part = sublayer.run(self.x, () if slot is None else slot.places(len(self.streams)))
            self._output = tokens.sum(sublayer.collective, part) if slot is None else slot
            yield Place.OUTPUT
            if site is None:
                self.streams = sublayer.site.leave(self.output, self.streams, self.mix, gather=gather)
            else:
                self.x, self.streams, self.mix = site.advance(self._output, self.streams, self.mix, step, gather=gather)

    @property
    def output(self) -> Tensor:
        """Output of the sublayer, whole [T, d]; not there where ranks exchange parts, which the next site adds."""
        assert isinstance(self._output, Tensor), "ranks' parts are added by the next site"
        return self._output

    @output.setter
    def output(self, output: Tensor) -> None:
        self._output = output

    def all_streams(self) -> Tensor:
        """:attr:`streams` of all tokens of the pass, whichever of them this rank keeps."""
        gather = self._tokens.gather
        return self.streams if gather is None else gather(self.streams)

    def finish(self) -> Walk:
        """Compute the whole pass; returns this walk."""
        for _ in self:
            pass
        return self
