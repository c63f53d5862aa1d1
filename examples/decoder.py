"""The decoder alone: greedy generation with no server, and the same tokens in one pass as a check of the caches.

    python examples/decoder.py                 # a tiny checkpoint with random weights
    python examples/decoder.py CHECKPOINT      # another one, on the CPU

Prints token ids: random weights write no text.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from nvfp4_sgl.standalone import Standalone
from nvfp4_sgl.synthetic.tiny import write_tiny

PROMPT = list(range(2, 152))
NEW = 12


def generate(model: Standalone, prompt: list[int], new: int) -> list[int]:
    """``new`` likeliest tokens after ``prompt``, one a pass."""
    tokens = list(prompt)
    logits = model.extend({0: prompt})[0]
    for _ in range(new):
        tokens.append(int(logits[-1].argmax()))
        logits = model.extend({0: tokens[-1:]})[0]
    return tokens[len(prompt) :]


def main(checkpoint: Path) -> list[int]:
    """Print and return the tokens; AssertionError if a single pass over them would choose others."""
    model = Standalone(checkpoint, requests=2, capacity=512)
    chosen = generate(model, PROMPT, NEW)
    at_once = model.extend({1: PROMPT + chosen})[1].argmax(-1).tolist()
    assert at_once[len(PROMPT) - 1 : -1] == chosen, "decode and a single pass disagree"
    print(f"{len(PROMPT)} tokens of prompt, then: {chosen}")
    return chosen


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_tiny(Path(folder) / "tiny", "nvfp4-full", seed=0)
            main(Path(folder) / "tiny")
