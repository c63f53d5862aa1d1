"""One decode step of a tiny checkpoint with a layer of each kind that compresses, behind a short prompt.

``python -m tests.sm100.triton.decode_step CHECKPOINT FILE``, with Triton's interpreter, saves what the prompt leaves in
the caches, and what the step gives if interpreted kernels and torch's GEMMs compute it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_sgl.standalone import Standalone
from tests.support import interpreter_speed
from tests.support.lockstep import Contents, contents, overwrite
from tests.support.reference_gemms import reference_gemms

SHAPES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "compress_ratios": [4, 128, 0],
    "n_routed_experts": 6,
    "index_topk": 512,
}
"""What a layer of the third kind launches, the others launch, too."""
PROMPT, TOKEN = [5, 61, 7], 300

Context = Callable[[], AbstractContextManager[Any]]


def load(checkpoint: Path) -> Standalone:
    """The model, its caches empty."""
    with reference_gemms():
        return Standalone(checkpoint, target="sm_100a", requests=1, capacity=256)


def decode_step(model: Standalone, around: Context) -> Tensor:
    """Log-probabilities of the step, which runs inside ``around``."""
    with reference_gemms():
        work = model.begin({0: [TOKEN]})
    with around():
        logits = model.forward(work)
    return logits.log_softmax(-1)


def prompt(model: Standalone) -> list[Contents]:
    """What the prompt leaves in the caches, layer by layer."""
    with reference_gemms():
        model.extend({0: PROMPT})
    return [{name: store.clone() for name, store in contents(cache).items()} for cache in model.caches.layers]


def behind_prompt(model: Standalone, left: list[Contents]) -> None:
    """Put the model behind the prompt that left this."""
    for cache, bytes_ in zip(model.caches.layers, left, strict=True):
        overwrite(cache, bytes_)
    model.caches.lengths[0] = len(PROMPT)


if __name__ == "__main__":
    interpreter_speed.install()
    interpreted = load(Path(sys.argv[1]))
    torch.save((prompt(interpreted), decode_step(interpreted, reference_gemms)), sys.argv[2])
