"""Tries out a checkpoint: reads its values, and generates some tokens on the CPU reference."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from nvfp4_sgl.checkpoint.scan import scan
from nvfp4_sgl.checkpoint.verified import verify
from nvfp4_sgl.errors import CheckpointError
from nvfp4_sgl.reports.inspection import inspect
from nvfp4_sgl.standalone import Standalone

PROMPT, GENERATED = 8, 8
"""Tokens: with so few each pass takes some milliseconds."""


@dataclass(frozen=True)
class Shown:
    """Results of trying out a checkpoint.

    Attributes:
        prompt: random token ids. generated: what follows, the likeliest token each time.
        seconds: reading, loading and generating.
    """

    prompt: list[int]
    generated: list[int]
    seconds: float

    def lines(self) -> list[str]:
        """For a person."""
        prompt, generated = (" ".join(map(str, ids)) for ids in (self.prompt, self.generated))
        return [
            f"values are right; the CPU reference generated with it ({self.seconds:.1f} s):",
            f"  prompt     {prompt}",
            f"  generated  {generated}",
        ]


def try_out(directory: Path, seed: int = 0) -> Shown:
    """Read all values of ``directory``, and generate greedily from a random prompt.

    Raises:
        CheckpointError: a value is wrong, or a logit is not finite.
    """
    started = time.monotonic()
    verified = verify(directory)
    if problems := inspect(verified, scan(verified)).problems:
        raise CheckpointError(f"{directory}: {problems[0].message}; see nvfp4-sgl inspect {directory} --values")
    model = Standalone(verified, requests=1, capacity=PROMPT + GENERATED)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(verified.config.vocab_size, (PROMPT,), generator=generator).tolist()
    generated: list[int] = []
    ids = prompt
    for _ in range(GENERATED):
        logits = model.extend({0: ids})[0][-1]
        if not logits.isfinite().all():
            raise CheckpointError(f"{directory}: expected finite logits, found NaN or infinities; write it again")
        ids = [int(logits.argmax())]
        generated += ids
    return Shown(prompt, generated, round(time.monotonic() - started, 2))
