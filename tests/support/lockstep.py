"""Sublayers of one decoder after another on the inputs, and the cached bytes, of a recorded run of the CPU reference.

Log-probabilities of a whole random model hide what a sublayer gets a little wrong, and where activations are FP4 a
rounding moves all that follows it. Here every sublayer starts from equal bits, so it may differ by its own roundings
alone. The recording holds tensors only: what replays it may be another target, or have a mistake planted in the very
model that recorded it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import pytest

    from nvfp4_sgl.cache.layer import LayerCache
    from nvfp4_sgl.cache.local import LocalCaches
    from nvfp4_sgl.standalone import Standalone

Contents = dict[str, Tensor]
"""Pages, uint8, and states, fp32, of one layer's caches by name."""


def contents(cache: LayerCache) -> Contents:
    """The tensors behind a layer's caches."""
    stores = {field.name: getattr(cache, field.name) for field in fields(cache)}
    return {name: getattr(store, "pages", store) for name, store in stores.items() if store is not None}


def overwrite(cache: LayerCache, bytes_: Contents) -> None:
    """Give a layer's caches other contents."""
    for name, store in contents(cache).items():
        store.copy_(bytes_[name])


@contextmanager
def choices(attention: Any) -> Iterator[list[Tensor]]:
    """What ``attention`` chooses inside the block: slots of ratio-4 entries, int64 [T, K] on the CPU, -1 padded.

    One tensor a pass; none where the layer has no indexer.
    """
    found: list[Tensor] = []
    if attention.select is None:
        yield found
        return

    def keep(module: object, inputs: object, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).long().cpu())

    hook = attention.select.register_forward_hook(keep)
    try:
        yield found
    finally:
        hook.remove()


@dataclass(frozen=True)
class Recorded:
    """One layer in one pass: what its sublayers read and gave; its caches before and after; the entries chosen."""

    attention: tuple[Tensor, Tensor]
    experts: tuple[Tensor, Tensor]
    before: Contents
    after: Contents
    chosen: list[Tensor]


@dataclass(frozen=True)
class Recording:
    """A run of the reference.

    Attributes:
        cached: tokens of each request before the first pass.
        passes: token ids that each pass adds, by request. layers: by pass and layer.
    """

    cached: dict[int, int]
    passes: list[dict[int, list[int]]]
    layers: list[list[Recorded]]


def activations(tokens: int, width: int, seed: int) -> Tensor:
    """Activations as a norm leaves them, with outliers, bf16 [tokens, width]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator)
    x[torch.rand(tokens, width, generator=generator) < 0.003] *= 20
    return x.bfloat16()


@torch.no_grad()
def record(
    path: Path,
    *,
    mode: Any,
    cached: Mapping[int, int],
    passes: Sequence[Mapping[int, list[int]]],
    capacity: int,
    fill: Callable[[LocalCaches, Mapping[int, int]], None] | None = None,
) -> Recording:
    """Let the CPU reference (bf16, packed rows) fill its caches, then run ``passes`` on random activations.

    ``fill``, if given, fills the caches for ``cached`` tokens instead.
    """
    from nvfp4_sgl.model.contract import Activation
    from nvfp4_sgl.standalone import Standalone

    requests = max([*cached, *(request for each in passes for request in each)]) + 1
    model = Standalone(path, packed=True, dtype=torch.bfloat16, mode=mode, requests=requests, capacity=capacity)
    width, layers = model.config.hidden_size, range(model.config.num_hidden_layers)
    if fill is not None:
        fill(model.caches, cached)
    else:
        prefill = model.begin({request: [0] * count for request, count in cached.items()})
        for layer in layers:
            x = activations(sum(cached.values()), width, layer)
            model.decoder.layers[layer].attn(Activation(x), prefill.step, model.caches.layers[layer])
    found = []
    for number, tokens in enumerate(passes):
        work, row = model.begin(tokens), []
        for layer in layers:
            block, cache = model.decoder.layers[layer], model.caches.layers[layer]
            before = {name: store.clone() for name, store in contents(cache).items()}
            x, y = (activations(len(work.ids), width, 100 * number + 2 * layer + n + 50) for n in range(2))
            with choices(block.attn) as chosen:
                attended = block.attn(Activation(x), work.step, cache).float()
            mixed = block.ffn(Activation(y), work.ids, work.step).float()
            after = {name: store.clone() for name, store in contents(cache).items()}
            row.append(Recorded((x, attended), (y, mixed), before, after, chosen))
        found.append(row)
    return Recording(dict(cached), [dict(each) for each in passes], found)


@dataclass(frozen=True)
class Replayed:
    """One layer in one pass: what the sublayers gave, fp32 on the CPU, the caches after, the planned step, and the
    entries chosen."""

    attention: Tensor
    experts: Tensor
    after: Contents
    step: Any
    chosen: list[Tensor]


@torch.no_grad()
def replay(model: Standalone, recording: Recording, layers: Sequence[int]) -> list[dict[int, Replayed]]:
    """The recorded passes by ``model``, layer by layer of ``layers``, each on recorded inputs and caches."""
    from nvfp4_sgl.targets.fused.activations import in_form

    model.reset()
    for request, count in recording.cached.items():
        model.caches.lengths[request] = count
    found = []
    for tokens, recorded in zip(recording.passes, recording.layers, strict=True):
        work, row = model.begin(tokens), {}
        for layer in layers:
            block: Any = model.decoder.layers[layer]
            cache, told = model.caches.layers[layer], recorded[layer]
            overwrite(cache, told.before)
            x, y = (pair[0].to(model.device) for pair in (told.attention, told.experts))
            with choices(block.attn) as chosen:
                attended = block.attn(in_form(x, block.attn.takes), work.step, cache)
            mixed = block.ffn(in_form(y, block.ffn.takes), work.ids, work.step)
            after = {name: store.cpu().clone() for name, store in contents(cache).items()}
            row[layer] = Replayed(attended.float().cpu(), mixed.float().cpu(), after, work.step, chosen)
        found.append(row)
    return found


def replace_sublayers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put permutations of the columns, each another, times a gain that is another for each place and token id, in the
    place of attention and experts."""

    def attention(layer: int) -> Callable[[Any, object, LayerCache, Sequence[Tensor]], Tensor]:
        def attend(x: Any, step: object, cache: LayerCache, places: Sequence[Tensor]) -> Tensor:
            assert cache is model.caches.layers[layer] and not places
            return x.require_values().roll(2 * layer + 1, dims=1) * (0.25 + 0.5 * layer)

        return attend

    def experts(layer: int) -> Callable[[Any, Tensor, object, Sequence[Tensor]], Tensor]:
        def mix(x: Any, ids: Tensor, step: object, places: Sequence[Tensor]) -> Tensor:
            assert not places
            values = x.require_values()
            return values.roll(2 * layer + 2, dims=1) * (0.5 * layer + ids[:, None].to(values) / 256)

        return mix

    for layer, block in zip(model.decoder.range, model.decoder.layers, strict=True):
        monkeypatch.setattr(block.attn, "forward", attention(layer))
        monkeypatch.setattr(block.ffn, "forward", experts(layer))


def relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Root mean square error of each row by its root mean square; [rows]. Not a number where a result is not one."""
    assert found.shape == expected.shape
    return (found - expected).norm(dim=1) / expected.norm(dim=1)


def check_writes(after: Contents, expected: Contents, before: Contents, share_allowed: float) -> None:
    """Both wrote the same places, and the same there but for codes and last bits that round apart."""
    for name, earlier in before.items():
        found, theirs = after[name], expected[name]
        if theirs.dtype == torch.uint8:
            written = (found != earlier) | (theirs != earlier)
            share = float((found != theirs).sum() / written.sum().clamp(min=1))
            assert share < share_allowed, f"{name}: {share:.0%} of the bytes written differ"
        else:
            assert torch.equal(found.isnan(), theirs.isnan()), f"{name}: other rows were written"
            difference = float((found - theirs).nan_to_num().norm() / theirs.nan_to_num().norm())
            assert difference < 0.01, f"{name} differs by {difference:.4f}"
