"""The demo of ``launch/demo --target sm_100a``: a tiny checkpoint answers token by token as a B200 would.

Every GEMM is SM100's, its PTX executed in the emulator, and everything else is SM100's Triton kernels, interpreted; the
CPU reference answers beside it in the same mode, ``w4a4``. Both continue with the emulated answer's tokens, so that
each step can be compared. Slow: ten seconds and more a token.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tokenizers import Tokenizer  # noqa: E402

from nvfp4_sgl.ops.modes import ActivationMode  # noqa: E402
from nvfp4_sgl.standalone import Standalone  # noqa: E402
from tests.sm100.support.launcher import emulated_operations  # noqa: E402
from tests.support import interpreter_speed  # noqa: E402

TOKENS = 6
CAPACITY = 256
CONFIDENT = 0.5
"""Probability above which the reference's next token should be the emulated one's, too."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompt", default="FP4 on B200")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    args = parser.parse_args()
    interpreter_speed.install()
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    ids = tokenizer.encode(args.prompt).ids
    settings: dict[str, Any] = {"mode": ActivationMode.W4A4, "requests": 1, "capacity": CAPACITY}
    reference = Standalone(args.checkpoint, packed=True, dtype=torch.bfloat16, **settings)
    print(f"== {len(ids)} prompt tokens; the SM100 decoder executed in the emulator beside the CPU reference, w4a4")
    agreed = confident = 0
    with emulated_operations() as runner:
        blackwell = Standalone(args.checkpoint, target="sm_100a", **settings)
        for _ in range(args.tokens):
            started, launched = time.monotonic(), len(runner.keys)
            ours = blackwell.extend({0: ids})[0][-1].softmax(-1)
            seconds = time.monotonic() - started
            theirs = reference.extend({0: ids})[0][-1].softmax(-1)
            best, expected = int(ours.argmax()), int(theirs.argmax())
            if not bool(torch.isfinite(ours).all()):
                print("demo: the SM100 decoder gave a NaN", file=sys.stderr)
                return 1
            print(
                f"emulated {tokenizer.decode([best])!r:>12} p {ours[best]:.2f} (reference gives it {theirs[best]:.2f});"
                f" reference {tokenizer.decode([expected])!r:>12} p {theirs[expected]:.2f};"
                f" {len(runner.keys) - launched} GEMMs, {seconds:.0f} s",
                flush=True,
            )
            if theirs[expected] > CONFIDENT:
                confident += 1
                agreed += best == expected
            ids = [best]
    print(f"of {confident} steps where the reference is confident, {agreed} agree")
    if agreed < confident:
        print("demo: the SM100 decoder answers otherwise than the reference", file=sys.stderr)
    return int(agreed < confident)


if __name__ == "__main__":
    sys.exit(main())
