"""Runs one layer on a target and on the CPU reference, from equal inputs, and compares what each boundary gives.

Weights are the checkpoint's, activations random. Every stretch of the layer begins from the reference's values and
cached bytes: the site before attention, attention, the site before the experts, the experts, the way out. So an error
was made by a boundary since its stretch began, and the first boundary whose error jumps is the one to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.cache.layer import LayerCache
from nvfp4_sgl.checkpoint.verified import Verified
from nvfp4_sgl.model.contract import Form, Operand
from nvfp4_sgl.ops.modes import ActivationMode
from nvfp4_sgl.standalone import Pass, Standalone
from nvfp4_sgl.targets.choose import choose
from nvfp4_sgl.targets.fused.operands import in_form
from nvfp4_sgl.targets.target import CPU
from nvfp4_sgl.tracing.taps import observing, owned

OUTLIER_SHARE, OUTLIER_FACTOR = 0.003, 20.0
"""A few activations of large models are many times the others."""


@dataclass(frozen=True)
class Stage:
    """What a boundary gave in one pass.

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
    """The layer as one side runs it, and what its boundaries gave in the pass at hand."""

    model: Standalone
    layer: int
    seen: dict[str, Tensor] = field(default_factory=dict)

    @property
    def cache(self) -> LayerCache:
        return self.model.caches.layers[self.layer]

    def run(self, work: Pass, streams: Tensor, given: Mapping[str, Tensor] | None = None) -> None:
        """Run a pass on ``streams`` [T, n, d]; every stretch from ``given``, another side's values, if there are."""
        model, step, stem = self.model, work.step, f"layers.{self.layer}"
        block: Any = model.decoder.layers[0]

        def output(name: str, own: Tensor) -> Tensor:
            return own if given is None else given[f"{stem}.{name}"].to(model.device, own.dtype)

        def entered(name: str, own: Operand, takes: Form) -> Operand:
            if given is None:
                return own
            return in_form(given[f"{stem}.{name}.x"].to(model.device, model.dtype), takes)

        def whole() -> Tensor:
            # A site may overwrite the streams.
            return streams.to(model.device, model.dtype, copy=True)

        def see(name: str, values: Tensor) -> None:
            self.seen[name] = owned(values).cpu()

        self.seen.clear()
        with observing(model.decoder, see):
            x, mix = block.hc_attn.enter(whole(), step)
            attended = block.attn(entered("hc_attn", x, block.attn.takes), step, self.cache)
            x, mixed, mix = block.hc_ffn.advance(output("attn.wo_b", attended), whole(), mix, step)
            summed = block.ffn(entered("hc_ffn", x, block.ffn.takes), work.ids, step)
            block.hc_ffn.leave(output("ffn.experts", summed), output("hc_ffn.streams", mixed), mix)


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
) -> Iterator[Stage]:
    """The stages of a prompt, then of ``steps`` decode steps, in the order in which the target ran them.

    The reference runs on the CPU with activations in fp32 and rows in SGLang's packed entries.

    Args:
        model: as of :class:`~nvfp4_sgl.standalone.Standalone`. layer: its number, from 0.
        target: whose boundaries are compared; of the CPU's, those with activations in bf16.
        device: a CUDA device for a GPU target.
        mode: what enters GEMMs with NVFP4 weights, on both sides; the target's default unless given.
        prompt: tokens of the first pass. seed: of activations and token ids.
    """
    mode = choose(target, mode).mode

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
