"""One layer: the sublayers of a CSA layer, one after the other, with the caches that they need.

    python examples/one_layer.py

Writes a tiny checkpoint into a temporary folder; runs on a CPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from nvfp4_sgl.model.layer import Place, Walk
from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny

LAYER = 1
"""The second layer of a tiny model is its first CSA layer: compressed entries and an indexer."""
CACHED, ADDED = 40, 3


@torch.no_grad()
def main() -> dict[str, tuple[int, ...]]:
    """Print and return the shapes of what flows through the layer."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tiny"
        write_tiny(checkpoint, "nvfp4-full", seed=0)
        model = Standalone(checkpoint, requests=1, capacity=256)
    ids = torch.randint(2, model.config.vocab_size, (CACHED + ADDED,), generator=torch.Generator().manual_seed(0))
    model.extend({0: ids[:CACHED].tolist()})  # fills the caches of every layer

    work = model.begin({0: ids[CACHED:].tolist()})  # what three more tokens see and write, planned for all layers
    block: Any = model.decoder.layers[LAYER]
    streams = model.decoder.embed(work.ids, model.table)
    sublayers = block.sublayers(work.ids, work.step, model.caches.layers[LAYER])
    walk, shapes = Walk(sublayers, None, streams, work.step), {}
    for place in walk:  # each mHC site mixes the output before it into the streams, collapses and normalises them
        if place is Place.INPUT:
            shapes[f"input of {walk.sublayer.name}"] = tuple(walk.x.require_values().shape)
        else:
            shapes[f"output of {walk.sublayer.name}"] = tuple(walk.output.shape)
    shapes["streams behind the layer"] = tuple(walk.streams.shape)

    print(f"layer {LAYER}: {model.config.kind(LAYER).name}, {CACHED} tokens cached, {ADDED} added")
    for what, shape in shapes.items():
        print(f"{what:<26} {shape}")
    assert bool(torch.isfinite(walk.streams).all())
    return shapes


if __name__ == "__main__":
    main()
