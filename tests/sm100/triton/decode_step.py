"""One decode step of a tiny checkpoint with a layer of each kind, behind a short prompt.

``python -m tests.sm100.triton.decode_step CHECKPOINT FILE``, with Triton's interpreter, saves what the step gives if
interpreted kernels and torch's GEMMs compute it.
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
from tests.support.reference_gemms import reference_gemms

SHAPES: dict[str, Any] = {"num_hidden_layers": 3, "n_routed_experts": 6, "index_topk": 512}
PROMPT, TOKEN = [5, 61, 7], 300

Context = Callable[[], AbstractContextManager[Any]]


def decode_step(checkpoint: Path, around: Context) -> Tensor:
    """Log-probabilities of the step, which runs inside ``around``; torch computes the GEMMs of the prompt."""
    with reference_gemms():
        model = Standalone(checkpoint, target="sm_100a", requests=1, capacity=256)
        model.extend({0: PROMPT})
        work = model.begin({0: [TOKEN]})
    with around():
        logits = model.forward(work)
    return logits.log_softmax(-1)


if __name__ == "__main__":
    interpreter_speed.install()
    torch.save(decode_step(Path(sys.argv[1]), reference_gemms), sys.argv[2])
