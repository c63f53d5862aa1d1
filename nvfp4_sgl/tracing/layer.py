"""Runs one layer on a target and on the CPU reference, from equal inputs, and compares what each boundary gives.

Weights are the checkpoint's, activations random. Every stretch of the layer begins from the reference's values and
cached bytes: the site before attention, attention, the site before the experts, the experts, the way out. So an error
was made by a boundary since its stretch began, and the first boundary whose error jumps is the one to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.model.layer import Place, Walk
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Pass, Standalone
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.targets.fused.activations import in_form
from nvfp4_sgl.targets.target import CPU
from nvfp4_sgl.tracing.taps import observing, owned

OUTLIER_SHARE, OUTLIER_FACTOR = 0.003, 20.0
"""A few activations of large models are many times the others."""
LAST_BOUNDARY = {"attn": "wo_b", "ffn": "experts"}
"""By the part of a layer, the boundary that gives its output."""


@dataclass(frozen=True)
class Stage:
    """The result of a boundary in one pass.

    Attributes:
        name: of the boundary. number: of the pass, from 0.
        median, worst: of the rows' errors, each the root mean square of the difference by that of the reference.
        bad: values of the target that are NaN or infinite.
        amax, reference_amax: largest magnitudes.
    """

    name: str
    number: int
    median: float
    worst: float
    bad: int
    amax: float
    reference_amax: float


@dataclass(frozen=True)
class _Side:
    """The layer as one side runs it, and what its boundaries gave in the current pass."""

    model: Standalone
    layer: int
    seen: dict[str, Tensor] = field(default_factory=dict)

    @property
    def cache(self) -> LayerCache:
        return self.model.caches.layers[self.layer]

    def run(self, work: Pass, streams: Tensor, given: Mapping[str, Tensor] | None = None) -> None:
        """Run a pass on ``streams`` [T, n, d]; every stretch from ``given``, another side's values, if there are."""
        model = self.model

        def see(name: str, values: Tensor) -> None:
            self.seen[name] = owned(values).cpu()

        self.seen.clear()
        with observing(model.decoder, see):
            block: Any = model.decoder.layers[0]
            own = streams.to(model.device, model.dtype, copy=True)  # a site may overwrite them
            walk = Walk(block.sublayers(work.ids, work.step, self.cache), None, own, work.step)
            for place in walk:
                if given is not None:
                    self._begin_from(given, walk, place)

    def _begin_from(self, given: Mapping[str, Tensor], walk: Walk, place: Place) -> None:
        """Put the other side's values in place of those that the walk has."""
        stem, _, part = walk.sublayer.name.rpartition(".")
        site, last = f"{stem}.hc_{part}", f"{walk.sublayer.name}.{LAST_BOUNDARY[part]}"
        device, dtype = self.model.device, self.model.dtype
        if place is Place.INPUT:
            walk.x = in_form(given[f"{site}.x"].to(device, dtype), walk.sublayer.takes)
            if f"{site}.streams" in given:
                walk.streams = given[f"{site}.streams"].to(device, walk.streams.dtype, copy=True)
        else:
            walk.output = given[last].to(device, walk.output.dtype)


@torch.no_grad()
def compare_layer(
    model: str | Path | Verified,
    layer: int,
    target: str,
    *,
    device: torch.device | str = "cpu",
    mode: ActivationMode | None = None,
    prompt: int = 300,
    steps: int = 2,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Stage]:
    """The stages of a prompt, then of ``steps`` decode steps, in the order in which the target ran them.

    The reference runs on the CPU with activations in fp32 and rows in SGLang's packed entries.

    Args:
        model: as of :class:`~nvfp4_sgl.standalone.Standalone`. layer: its number, from 0.
        target: whose boundaries are compared; of the CPU's, those with activations in bf16.
        device: a CUDA device for a GPU target.
        mode: what enters GEMMs with NVFP4 weights, on both sides; the target's default unless given.
        prompt: tokens of the first pass. seed: of activations and token ids.
        say: takes what is begun, a line each.
    """
    mode = choose(target, mode).mode
    say(f"loading layer {layer}, for the reference and for {target}")

    def side(target: str, device: torch.device | str, dtype: torch.dtype) -> _Side:
        loaded = Standalone(
            model,
            target=target,
            device=device,
            mode=mode,
            packed=True,
            dtype=dtype,
            requests=1,
            capacity=prompt + steps,
            layers=range(layer, layer + 1),
        )
        return _Side(loaded, layer)

    reference, ours = side(CPU.word, "cpu", torch.float32), side(target, device, torch.bfloat16)
    config, generator = reference.model.config, torch.Generator().manual_seed(seed)
    for number, tokens in enumerate([prompt, *[1] * steps]):
        say(f"pass {number} of {steps + 1}: {tokens} tokens")
        ids = torch.randint(config.vocab_size, (tokens,), generator=generator).tolist()
        streams = torch.randn(tokens, config.hc_mult, config.hidden_size, generator=generator)
        streams[torch.rand(streams.shape, generator=generator) < OUTLIER_SHARE] *= OUTLIER_FACTOR
        streams = streams.bfloat16()
        _copy_cache(reference.cache, ours.cache)
        reference.run(reference.model.begin({0: ids}), streams)
        ours.run(ours.model.begin({0: ids}), streams, reference.seen)
        for name, found in ours.seen.items():
            yield _stage(name, number, found, reference.seen[name])


def _copy_cache(source: LayerCache, target: LayerCache) -> None:
    """Give a layer's caches the contents of another's, packed alike."""
    for each in fields(source):
        theirs, ours = getattr(source, each.name), getattr(target, each.name)
        if theirs is not None:
            getattr(ours, "pages", ours).copy_(getattr(theirs, "pages", theirs))


def _stage(name: str, number: int, found: Tensor, expected: Tensor) -> Stage:
    bad = int((~found.isfinite()).sum())
    rows, theirs = (values.nan_to_num(0.0, 0.0, 0.0).flatten(1) for values in (found, expected))
    size = theirs.norm(dim=1)
    errors = torch.where(size > 0, (rows - theirs).norm(dim=1) / size, rows.norm(dim=1))
    amax, reference_amax = (float(values.abs().max()) for values in (rows, theirs))
    return Stage(name, number, float(errors.median()), float(errors.max()), bad, amax, reference_amax)
